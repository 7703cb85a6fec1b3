"""The current folder of `mizzen up` has modules of the names that mizzen imports (`shared`): it does not matter."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.decoys import Decoys
from tests.stack.harness import ROOT, Up, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]
_PROGRAMS = Path(sys.executable).parent


def _runs(up: Up, folder: Path) -> None:
    """Runs a workload that imports a module of its own, which has the name of one of mizzen's packages."""
    (folder / "server").mkdir(parents=True)
    (folder / "server" / "__init__.py").write_text("WORD = 'own'\n")
    (folder / "train.py").write_text("import server\nassert server.WORD == 'own'\n")
    run = 'exec "$MIZZEN_PYTHON" -c "import server; assert server.WORD == \'own\'; import train"'
    job = {"name": "j", "resources": {"accelerators": "a100:1", "cpus": 0.1, "memory": "64MiB"}, "run": run}
    document = {"version": 1, "name": "imports", "tenant": "t", "jobs": [job]}
    workload = str(up.client().submit(document, workdir=folder)["id"])
    wait_until(lambda: up.ended(workload), "the workload succeeds")


def test_a_task_imports_from_its_own_folder(shared: Up, tmp_path: Path) -> None:
    """Archives are checked and workloads run; a task imports modules from its working folder, as Python always does."""
    _runs(shared, tmp_path / "work")


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Path]:
    """The folder of the programs of an environment in which the three wheels are installed, without the checkout."""
    for folder in (ROOT, ROOT / "sdk", ROOT / "client"):
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "wheels")]
        subprocess.run(build, cwd=folder, check=True, capture_output=True)
    programs = tmp_path / "environment" / "bin"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", programs.parent], check=True)
    wheels = [str(wheel) for wheel in (tmp_path / "wheels").glob("*.whl")]
    install = [_PROGRAMS / "uv", "pip", "install", "-q", "--offline", "--no-deps", "--python", programs / "python"]
    subprocess.run([*install, *wheels], check=True)
    # Libraries are those of this environment. Python does not process the `.pth` files there, which name the checkout.
    [libraries] = (name for name in sys.path if name.endswith("site-packages"))
    [packages] = programs.parent.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(f"{libraries}\n")
    (programs / "temporal").symlink_to(_PROGRAMS / "temporal")
    yield programs


@pytest.mark.long
def test_the_wheel_ignores_the_current_folder(up: Up, installed: Path) -> None:
    """Installed from wheels, too, mizzen imports nothing from the current folder: it starts, and runs a workload."""
    decoys = Decoys(up.folder / "project")
    up.bin, up.cwd, up.environment = installed, decoys.path, decoys.environment
    up.start(timeout_s=400)  # It first compiles the inner loops.
    up.client().set_tenant("t", 3, {"a100": 8}, None)
    _runs(up, up.folder / "work")
    assert up.interrupt() == 0
    assert decoys.imported() == ""
