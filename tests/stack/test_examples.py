"""What the README and the examples tell a new user to type, typed on a stack with the default fleet."""

import os
import re
import subprocess
from collections.abc import Iterator

import pytest

from tests.stack.harness import ROOT, Up

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]
ADDRESS = "http://127.0.0.1:8080"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A stack as `mizzen up` starts it in a folder that looks like a checkout."""
    up = Up(tmp_path_factory.mktemp("checkout"), fleet=None, lost_s=120)
    up.data = up.folder / "mizzen-data"
    for name in (".venv", "examples", "sdk"):
        (up.folder / name).symlink_to(ROOT / name)
    try:
        up.start()
        yield up
        assert up.interrupt() == 0
    finally:
        up.close()


def _typed(stack: Up, commands: str) -> str:
    """What a shell prints that runs the commands one after the other, each of which must succeed."""
    assert ADDRESS in commands
    script = commands.replace(ADDRESS, f"http://127.0.0.1:{stack.ports['port']}")
    environment = {**os.environ, "HOME": str(stack.folder), "XDG_CONFIG_HOME": str(stack.folder / ".config")}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=stack.folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_first_workload_of_the_readme(stack: Up) -> None:
    """Log in, make a tenant, submit: both tasks say their rank, and the workload succeeds."""
    section = (ROOT / "README.md").read_text().split("\n## Your own workload\n")[1].split("\n## ")[0]
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", section, re.MULTILINE)
    lines = [line[4:] for block in blocks for line in block.splitlines() if "mizzen up" not in line]
    said = _typed(stack, "\n".join(lines))
    assert "rank 0 of 2" in said and "rank 1 of 2" in said and "succeeded" in said


def test_the_digits(stack: Up) -> None:
    """The example trains to its end as shipped."""
    readme = (ROOT / "examples" / "digits" / "README.md").read_text()
    said = _typed(stack, "\n".join(re.findall(r"^```sh\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)))
    assert "succeeded" in said and "accuracy" in said


def test_every_example_says_how_to_run_it() -> None:
    """No example without a README."""
    examples = [folder for folder in (ROOT / "examples").iterdir() if folder.is_dir()]
    assert len(examples) >= 2 and all((folder / "README.md").exists() for folder in examples)
