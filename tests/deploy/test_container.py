"""The image of `deploy/Containerfile`, built on a root of debootstrap, runs hello as an ordinary user.

MIZZEN_TEST_CONTAINER (`make test-container`) selects it. What it makes is removed, except the image of the base, which
MIZZEN_TEST_BASE can name for the next run.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

NEEDED = ("podman", "debootstrap")
PACKAGES = "python3,python3-venv,ca-certificates"
HELLO = """
version: 1
name: hello
tenant: vision
jobs:
  - name: trainer
    tasks: 2
    resources: {accelerators: "gpu:1", cpus: 1, memory: 256MiB}
    run: echo "rank $RANK of $WORLD_SIZE is user $(id -u)"
"""
SCRIPT = r"""
set -eu
mizzen login http://127.0.0.1:8080 --key - < /data/operator.key
mizzen tenants set vision --level 3 --gpus gpu=8
mizzen submit /hello.yaml --follow
mizzen wait hello
id -u
grep CapBnd /proc/self/status
"""
LIMITS = ("--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096")
"""Podman's defaults may be above those of this machine."""
READY = """
import sys, time, urllib.request
for _ in range(600):
    try:
        urllib.request.urlopen("http://127.0.0.1:8080/readyz")
        sys.exit()
    except OSError:
        time.sleep(0.5)
sys.exit(1)
"""
pytestmark = pytest.mark.skipif(
    "MIZZEN_TEST_CONTAINER" not in os.environ
    or os.geteuid() != 0
    or any(shutil.which(name) is None for name in NEEDED),
    reason="only for root with podman and debootstrap, by make test-container",
)


def _podman(*arguments: str | Path, **options: object) -> str:
    command = ["podman", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return str(done.stdout)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of an image with Python and Debian's smallest system."""
    if (given := os.environ.get("MIZZEN_TEST_BASE")) is not None:
        return given
    root = tmp_path_factory.mktemp("base") / "root"
    suite = re.search(r"VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text())
    assert suite is not None
    subprocess.run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite[1], str(root)], check=True)
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as tar:
        _podman("import", "-", "localhost/mizzen-base:test", stdin=tar.stdout)
    return "localhost/mizzen-base:test"


@pytest.fixture(scope="module")
def image(base: str, checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of the image. Its packages come from the registry that this machine's pip uses."""
    folder = tmp_path_factory.mktemp("wheels")
    lines = re.sub(r" *\\$|^ +--hash.*\n", "", (checkout / "requirements.lock").read_text(), flags=re.MULTILINE)
    (folder / "constraints.txt").write_text(lines)
    wanted = subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "-d", folder, "-c", folder / "constraints.txt",
         "hatchling", "django-htmx", f"{checkout}/sdk", f"{checkout}/client", checkout],
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert wanted.returncode == 0, wanted.stderr
    arguments = [
        "--build-arg",
        f"BASE={base}",
        "--build-arg",
        "PIP_NO_INDEX=1",
        "--build-arg",
        "PIP_FIND_LINKS=/wheels",
    ]
    _podman("build", "-f", "deploy/Containerfile", *arguments, "--volume", f"{folder}:/wheels:ro", "-t",
            "localhost/mizzen:test", ".", cwd=checkout)  # fmt: skip
    yield "localhost/mizzen:test"
    _podman("rmi", "--force", "localhost/mizzen:test")


def test_hello_runs_in_the_image_as_an_ordinary_user(image: str, tmp_path: Path) -> None:
    """`mizzen up` starts without capabilities on a read-only root, and a gang of two tasks ends."""
    document = tmp_path / "hello.yaml"
    document.write_text(HELLO)
    closed = [
        "--read-only",
        "--cap-drop=all",
        "--security-opt=no-new-privileges",
        "--tmpfs=/tmp",
        "--network=none",
        *LIMITS,
    ]
    container = _podman("run", "-d", *closed, "-v", f"{document}:/hello.yaml:ro", image).strip()
    try:
        _podman("exec", container, "python3", "-c", READY)
        said = _podman("exec", container, "sh", "-c", SCRIPT)
        assert "rank 0 of 2 is user" in said and "rank 1 of 2 is user" in said
        assert "\n10001\n" in said and "CapBnd:\t0000000000000000" in said
        assert "is user 0" not in said
    finally:
        logs = subprocess.run(["podman", "logs", container], capture_output=True, text=True, check=False)
        print(logs.stdout[-3000:], logs.stderr[-3000:])
        _podman("rm", "--force", "--volumes", container)
