"""The commands in the README and in the examples work on a stack with the default fleet."""

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from infra.stack.ports import free_port
from tests.stack.harness import BARE_UID, ROOT, BareUp, Up, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]
ADDRESS = "http://127.0.0.1:8080"
BALANCER = "127.0.0.1:8000"
PROVIDERS = ROOT / "docs" / "providers.md"
_USUAL_PORTS = (8080, 5433, 7233, 8233)
LOGS = "logs: {max_bytes: 100, keep: 1, check_interval_s: 0.5}\n"


def write_philly(path: Path, days: int = 35, rows: int = 600) -> None:
    """Writes a small trace in the form of the Philly trace, with the most GPUs in its last days."""
    chance, begin = random.Random(5), datetime(2017, 10, 3)
    lines = ["timestamp,duration,num_gpus,gpu_time,cluster"]
    for at_s in sorted(days * 86400 * chance.random() ** 0.5 for _ in range(rows)):
        gpus, duration_s = chance.choice((1, 1, 2, 8)), chance.choice((300.0, 3000.0, 30000.0))
        stamp = (begin + timedelta(seconds=int(at_s))).isoformat(sep=" ")
        lines.append(f"{stamp},{duration_s},{gpus},{gpus * duration_s},{chance.choice('abcdef')}")
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A stack that `mizzen up` starts in a folder that looks like a checkout.

    If possible, its user is a bare number, and the usual ports are in use, as if another user had started a stack.
    """
    kind = BareUp if os.geteuid() == 0 else Up
    [settings] = re.findall(r"<<'EOF'\n(.*?)^    EOF", PROVIDERS.read_text(), re.MULTILINE | re.DOTALL)
    up = kind(tmp_path_factory.mktemp("checkout"), fleet=None, lost_s=120, settings=textwrap.dedent(settings) + LOGS)
    up.data = up.folder / "mizzen-data"
    for name in (".venv", "client", "sdk"):
        (up.folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "examples", up.folder / "examples")
    write_philly(up.folder / "philly.csv")
    try:
        with contextlib.ExitStack() as others:
            for port in _USUAL_PORTS:
                with contextlib.suppress(OSError):  # Another process uses it already.
                    others.enter_context(socket.create_server(("127.0.0.1", port)))
            up.start()
        yield up
        assert up.interrupt() == 0
    finally:
        up.close()


def _typed(stack: Up, commands: str) -> str:
    """Runs commands in a shell, each of which must succeed; returns the output."""
    script = commands.replace(ADDRESS, f"http://127.0.0.1:{stack.port}")
    script = script.replace(BALANCER, f"127.0.0.1:{free_port()}")
    environment = {**os.environ, "HOME": str(stack.folder), "XDG_CONFIG_HOME": str(stack.folder / ".config")}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        # Files and a session of its own: what runs in the background after a failure neither delays the test nor stays.
        shell = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=stack.folder,
            env=environment,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            code: int | None = shell.wait(timeout=200)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
        out.seek(0)
        err.seek(0)
        said = out.read()
        assert code == 0, f"{script}\n{said}\n{err.read()}"
    return said


def test_the_first_workload_of_the_readme(stack: Up) -> None:
    """The README's commands create a tenant and submit a workload, which succeeds; they work a second time, too."""
    section = (ROOT / "README.md").read_text().split("\n## Hello\n")[1].split("\n## ")[0]
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", section, re.MULTILINE)
    lines = [line[4:] for block in blocks for line in block.splitlines() if "mizzen up" not in line]
    for _ in range(2):
        said = _typed(stack, "\n".join(lines))
        assert "rank 0 of 2" in said and "rank 1 of 2" in said and "succeeded" in said


@pytest.mark.long
def test_the_pool_of_the_page_on_providers(stack: Up) -> None:
    """With the settings of the page, its first commands make a pool, which launches machines of the emulated cloud."""
    section = PROVIDERS.read_text().split("\n## ")[0]
    lines = re.findall(r"^    (mizzen (?:pools|instances).*)$", section, re.MULTILINE)
    assert len(lines) == 3
    key = "mizzen login http://127.0.0.1:8080 --key - < mizzen-data/operator.key"
    _typed(stack, "\n".join(['export PATH="$PWD/.venv/bin:$PATH"', key, *lines, *lines]))
    client = stack.client()
    wait_until(lambda: len(list(client.instances())) == 4, "the pool launches its machines")
    assert {one["kind"] for one in client.instances()} == {"spot"}  # The cheapest offers.
    client.set_pool("local", "burst", size=0)
    wait_until(lambda: list(client.instances()) == [], "the machines are terminated")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes as another user")
def test_a_bare_number_runs_the_stack(stack: Up) -> None:
    """Every part starts, among them Postgres and Temporal, whose programs look up their user, and a workload runs.

    Free ports replace those that are in use.
    """
    assert isinstance(stack, BareUp)
    assert {owner.st_uid for owner in (path.stat() for path in stack.data.iterdir())} == {BARE_UID}
    assert stack.port not in _USUAL_PORTS
    assert f"http://127.0.0.1:{stack.port}" in (stack.folder / "up.log").read_text()
    stack.client().set_tenant("t", 3, {"gpu": 8}, None)
    workload = stack.submit("counts", steps=2, step_s=0.05, gpu="gpu")
    wait_until(lambda: stack.ended(workload), "the workload succeeds")


def _commands_of(example: Path) -> str:
    """Returns the shell commands of an example's README."""
    return "\n".join(re.findall(r"^```sh\n(.*?)^```", (example / "README.md").read_text(), re.MULTILINE | re.DOTALL))


ON_GPU = {"torchtitan"}
"""Examples that `make test-gpu` runs."""
EXAMPLES = sorted(path.parent for path in (ROOT / "examples").glob("*/README.md") if path.parent.name not in ON_GPU)
PRINTS = {
    "checkpoints": ("started at step 0", "is intact", "resumed at step", "finished at step 600"),
    "digits": ("succeeded", "accuracy"),
    "hello": ("hello from rank 0 of 2", "hello from rank 1 of 2", "succeeded"),
    "llm": ('"completion_tokens": 40', "data: [DONE]", "chat.completion.chunk", "replicas ready", "ended"),
    "serving": ("2/2", "data: [DONE]", "ended"),
    "philly": ("federated", "MISSED IN QUOTA"),
}


LONG = {"philly", "llm"}


@pytest.mark.rotating
@pytest.mark.parametrize(
    "example",
    [pytest.param(one, marks=pytest.mark.long) if one.name in LONG else one for one in EXAMPLES],
    ids=lambda path: path.name,
)
def test_an_example(stack: Up, example: Path) -> None:
    """The commands of its README succeed, one after the other, and print what it promises."""
    said = _typed(stack, _commands_of(example))
    assert [text for text in PRINTS[example.name] if text not in said] == [], said


def test_every_example_is_in_the_gallery() -> None:
    """Each folder has a README with commands, and a row in the list of examples."""
    folders = {path.name for path in (ROOT / "examples").iterdir() if path.is_dir() and path.name != "__pycache__"}
    listed = set(re.findall(r"\]\((\w+)/README\.md\)", (ROOT / "examples" / "README.md").read_text()))
    assert folders == listed == ON_GPU | {example.name for example in EXAMPLES if _commands_of(example)}


def test_logs_do_not_grow(stack: Up) -> None:
    """Each part's log is rotated while the stack runs, and parts continue to write to it."""
    logs = stack.data / "run" / "log"
    wait_until(lambda: list(logs.glob("*.log.1")), "a log was rotated")
    wait_until(lambda: all(log.stat().st_size <= 100 for log in logs.glob("*.log")), "no log is longer than 100 bytes")
