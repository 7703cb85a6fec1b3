"""A project folder as it usually is, on a running stack: a git checkout with a virtual environment and links."""

import hashlib
import random
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.stack.harness import Up
from tests.stack.test_run import ended, mizzen

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]
_RUN = "ls -A; readlink runs/latest; sha256sum weights; cat train.py"


def _project(folder: Path) -> Path:
    """Makes the folder. What is not to be uploaded alone exceeds the limit of one request."""
    chance = random.Random(5)
    (folder / "data").mkdir(parents=True)
    (folder / "runs").mkdir()
    subprocess.run(["git", "init", "-q", folder], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
    (folder / ".gitignore").write_text(".venv\ndata\n")
    (folder / "data" / "big").write_bytes(chance.randbytes(20 << 20))
    (folder / ".git" / "objects" / "pack" / "x.pack").write_bytes(chance.randbytes(20 << 20))
    (folder / "weights").write_bytes(chance.randbytes(40 << 20))
    (folder / "runs" / "latest").symlink_to("2026-01-01")
    (folder / "train.py").write_text("first\n")
    return folder


@pytest.mark.rotating
def test_a_project_folder_is_submitted(shared: Up, tmp_path: Path) -> None:
    """Links in the folder are kept, and what `.gitignore` lists is not sent. The folder exceeds one request, 16 MiB."""
    project = _project(tmp_path / "proj")
    job = {"name": "t", "resources": {"cpus": 0.1, "memory": "256MiB"}, "run": _RUN}
    document = {"version": 1, "name": "wd", "tenant": "t", "workdir": "./proj", "jobs": [job]}
    (tmp_path / "w.yaml").write_text(yaml.safe_dump(document))
    weights = hashlib.sha256((project / "weights").read_bytes()).hexdigest()
    for content in ("first", "second"):
        (project / "train.py").write_text(f"{content}\n")
        code, out, err = ended(mizzen(shared, tmp_path, "submit", "w.yaml", "--follow"))
        assert code == 0, err
        for expected in (".gitignore", "runs", "train.py", "2026-01-01", f"{weights}  weights", content):
            assert expected in out
        assert not {".git", ".venv", "data"} & set(out.split())
