"""The wheels of the SDK and of the client, in fresh environments."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

_PROGRAMS = Path(sys.executable).parent
_MOST_BYTES = 362_000
"""The size of the SDK's wheel. Training images install it; what grows it must be worth that."""


@pytest.fixture(scope="module")
def wheels(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns the wheels by the name of their distribution."""
    folder = tmp_path_factory.mktemp("wheels")
    for name in ("sdk", "client"):
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        subprocess.run(command, cwd=checkout / name, check=True, capture_output=True, timeout=100)
    return {path.name.partition("-")[0]: path for path in folder.glob("*.whl")}


def _installed(folder: Path, *names: Path) -> Path:
    """Installs wheels in a new environment, which has the libraries of this one, and returns its programs."""
    venv.create(folder, with_pip=False)
    install = [
        _PROGRAMS / "uv",
        "pip",
        "install",
        "-q",
        "--offline",
        "--no-deps",
        "--python",
        folder / "bin" / "python",
    ]
    subprocess.run([*install, *names], check=True, capture_output=True, timeout=100)
    return folder / "bin"


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    return subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True, timeout=60)


def test_two_wheels_never_write_into_one_package(wheels: dict[str, Path]) -> None:
    """Each has one package of its own; only the SDK has the program."""
    tops = {}
    for name, path in wheels.items():
        names = zipfile.ZipFile(path).namelist()
        tops[name] = {file.partition("/")[0] for file in names if ".dist-info/" not in file}
        assert any(file.endswith("entry_points.txt") for file in names) == (name == "mizzen")
    assert tops == {"mizzen": {"mizzen"}, "mizzen_client": {"mizzen_client"}}
    assert wheels["mizzen"].stat().st_size <= _MOST_BYTES


def test_the_sdk_alone_has_the_command(wheels: dict[str, Path], tmp_path: Path) -> None:
    """Without any other distribution, checkpoints can be saved and listed; other commands name mizzen-client."""
    programs = _installed(tmp_path / "alone", wheels["mizzen"])
    save = f"import mizzen; mizzen.Checkpointer({str(tmp_path / 'run')!r}).save(7, {{'a': 1}})"
    saved = _run(programs / "python", "-c", save)
    assert saved.returncode == 0, saved.stderr
    listed = _run(programs / "mizzen", "checkpoint", "ls", tmp_path / "run", "-o", "name")
    assert (listed.returncode, listed.stdout.partition(".")[0]) == (0, "step-0000000007")
    refused = _run(programs / "mizzen", "ls")
    assert refused.returncode == 2 and "pip install mizzen-client" in refused.stderr


def test_with_the_client_it_has_all_commands(wheels: dict[str, Path], tmp_path: Path) -> None:
    """Beside the client and its libraries, the same program has its commands, and `mizzen.client` its names."""
    programs = _installed(tmp_path / "both", *wheels.values())
    [packages] = programs.parent.glob("lib/python*/site-packages")
    [libraries] = (name for name in sys.path if name.endswith("site-packages"))
    # Python does not process the `.pth` files there, which name the checkout.
    (packages / "libraries.pth").write_text(f"{libraries}\n")
    told = _run(programs / "mizzen", "ls", "--patience", "0")
    assert told.returncode != 0 and "mizzen login" in told.stderr, told.stderr
    assert _run(programs / "mizzen", "version").stdout.startswith("mizzen ")
    name = _run(programs / "python", "-c", "import mizzen.client as c, mizzen; print(c.Client, mizzen.Executor)")
    assert "mizzen_client.client.Client" in name.stdout and "mizzen_client.functions.executor" in name.stdout
