"""How mizzen starts Python processes: none imports from the current folder (`infra.children`)."""

import re
import subprocess
from pathlib import Path

import pytest

from infra import children
from tests.decoys import Decoys, packages

OTHERS = {
    "agent/isolation.py": "isolated",
    "agent/memory_servers.py": "isolated",
    "agent/lending/owner_socket.py": "tells the owner's command the agent's own Python",
    "agent/network/shaping.py": "isolated",
    "agent/sandbox.py": "isolated",
    "agent/sandbox_view.py": "which mounts would hide Python",
    "agent/zygote_client.py": "isolated",
    "agent/stores.py": "isolated",
    "agent/output_storage.py": "isolated",
    "agent/task_launches.py": "MIZZEN_PYTHON of tasks",
    "agent/containers/launch.py": "the variable of containers",
    "agent/containers/inside/sitecustomize.py": "the variable of containers",
    "infra/stack/temporal.py": "the folder of installed programs",
    "sdk/mizzen/checkpoint/first_run.py": "starts a script again, which imports from its own folder",
    "sdk/mizzen/integrations/torch.py": "passes on an option of torch's loader",
    "sdk/mizzen/memory/connection.py": "isolated",
    "server/demo/checks.py": "starts a script, which imports from its own folder",
}
"""The modules that use the path of Python for something else than `infra.children`."""


def test_no_other_module_starts_python(checkout: Path) -> None:
    """Only known modules use the path of Python; those that start a process with it isolate the process (`-I`)."""
    found = {}
    for package in [*packages(), "client/mizzen_client", "sdk/mizzen"]:
        for path in (checkout / package).rglob("*.py"):
            text = path.read_text()
            if re.search(r"sys\.executable|multiprocessing|ProcessPool|PYTHONPATH", text):
                found[str(path.relative_to(checkout))] = text
    assert found.keys() - {"infra/children.py", "sdk/mizzen/cli/main.py"} == OTHERS.keys()
    for name, reason in OTHERS.items():
        assert reason != "isolated" or found[name].count('"-I"') >= found[name].count("[sys.executable"), name


def test_a_child_imports_what_its_parent_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child imports mizzen's packages, although the current folder and PYTHONPATH have others of their names."""
    decoys = Decoys(tmp_path / "project")
    monkeypatch.chdir(decoys.path)
    monkeypatch.setenv("PYTHONPATH", decoys.environment["PYTHONPATH"])
    for arguments in (("-m", "tetris"), ("-m", "api.data.archive_check", "{}")):
        done = subprocess.run(children.python(*arguments), env=children.environment(), capture_output=True, text=True)
        assert "project" not in done.stderr
    assert decoys.imported() == ""
