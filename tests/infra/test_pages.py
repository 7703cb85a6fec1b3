"""Commands of the pages in `docs/` that users copy."""

import os
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from agent.launch import DEFAULT_PATH

_SETUP = re.compile(r"^ *setup: (.*?)(?: +#.*)?$", re.MULTILINE)
_MARKS = [*Path("/usr/lib").glob("python3*/EXTERNALLY-MANAGED")]


def _wheel(folder: Path) -> Path:
    """Writes a distribution with one module, which can be installed without a network."""
    path, info = folder / "needed-1-py3-none-any.whl", "needed-1.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("needed.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: needed\nVersion: 1\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.long
def test_the_setup_of_the_pages_installs_libraries(checkout: Path, tmp_path: Path) -> None:
    """Each `setup` of a page is the same command, and works where the distribution owns Python's packages (PEP 668)."""
    pages = [*(checkout / "docs").rglob("*.md"), *(checkout / "examples").rglob("*.yaml")]
    found = {line for page in pages for line in _SETUP.findall(page.read_text()) if "install" in line}
    [command] = found
    assert ".venv/bin/pip install -r requirements.txt" in command
    if not _MARKS:
        pytest.skip("this Python's packages do not belong to the distribution")
    (tmp_path / "requirements.txt").write_text(f"{_wheel(tmp_path)}\n")
    environment = {"PATH": DEFAULT_PATH, "HOME": str(tmp_path), "LANG": "C.UTF-8", "PIP_NO_INDEX": "1"}
    subprocess.run(["/bin/sh", "-eu", "-c", command], cwd=tmp_path, env=environment, check=True, capture_output=True)
    subprocess.run([".venv/bin/python", "-c", "import needed"], cwd=tmp_path, env={**os.environ}, check=True)
