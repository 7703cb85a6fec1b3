"""A user that is a bare number, without an entry in passwd and without USER and HOME, as in many containers."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from domain.machine_code import folder_of
from tests.stack.harness import ROOT, Up, wait_until

pytestmark = [
    pytest.mark.stack,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes as another user"),
]
UID = 2_345_678
# Python may be below a folder that only root can enter: the process gets a view of it, as tasks do.
_BECOME = """
import json, os, sys
told = json.loads(sys.argv[1])
sys.path.insert(0, told["root"])
from agent.view import enter_view, view_for
enter_view(view_for(told["uid"], told["paths"]))
os.setgroups([]); os.setgid(told["uid"]); os.setuid(told["uid"])
os.execve(told["argv"][0], told["argv"], told["env"])
"""


class BareUp(Up):
    """A stack that a bare number runs."""

    def command(self) -> list[str]:
        """Returns the command line that becomes the user and then `mizzen up`."""
        told = {
            "root": str(ROOT),
            "uid": UID,
            "paths": [str(ROOT), sys.prefix, sys.base_prefix, str(self.folder)],
            "argv": super().command(),
            "env": {"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(self.folder / "cache")},
        }
        return [sys.executable, "-I", "-c", _BECOME, json.dumps(told)]


def test_a_bare_number_runs_the_stack(tmp_path: Path) -> None:
    """Every part starts, among them Postgres and Temporal, whose programs look up their user, and a workload runs."""
    up = BareUp(tmp_path, fleet=None)
    for package in ("gms", "rms"):  # So that the loops are not compiled again.
        folder = Path(folder_of(str(ROOT / package)) or "")
        shutil.copytree(folder, up.folder / "cache" / "mizzen" / package / folder.name, copy_function=shutil.copy2)
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, UID, UID)
    up.cwd = tmp_path
    try:
        up.start()
        up.client().set_tenant("t", 3, {"gpu": 8}, None)
        workload = up.submit("counts", steps=2, step_s=0.05, gpu="gpu")
        wait_until(lambda: up.ended(workload), "the workload succeeds")
        assert up.interrupt() == 0
    finally:
        up.close()
