"""`mizzen exec` on a running stack, in sandboxes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stack.harness import Up, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]
_COMMAND = Path(sys.executable).parent / "mizzen"
_FLEET = """
version: 1
regions: [{name: east, clusters: [{name: a, machines: [{name: m, count: 2, gpus: 2, gpu_type: a100, cpus: 8,
  memory: 4GiB}]}]}]
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A stack whose tasks run in sandboxes."""
    up = Up(tmp_path_factory.mktemp("exec"), _FLEET, lost_s=120)
    config = up.folder / "config.yaml"
    config.write_text(config.read_text().replace("isolation: none", "isolation: sandbox"))
    try:
        up.start()
        up.client().set_tenant("t", 3, {"a100": 4}, None)
        up.client().set_tenant("other", 3, {"a100": 4}, None)
        yield up
        assert up.interrupt() == 0
    finally:
        up.close()


def running(stack: Up, run: str = "sleep 600", **job: Any) -> str:
    """Submits a workload, and waits until it runs; returns its id."""
    resources = {"cpus": 0.1, "memory": "64MiB"}
    document = {"version": 1, "name": "target", "tenant": "t"}
    document["jobs"] = [{"name": "main", "resources": resources, "run": run, **job}]
    id_ = str(stack.client().submit(document)["id"])
    wait_until(lambda: stack.phase(id_) == "running", "the workload runs")
    return id_


def command(stack: Up, *arguments: str, key: str | None = None, **options: Any) -> "subprocess.Popen[bytes]":
    """Starts a command of the client."""
    environ = {**os.environ, "MIZZEN_API": stack.client().url}
    environ["MIZZEN_API_KEY"] = key or (stack.data / "operator.key").read_text().strip()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([_COMMAND, *arguments], env=environ, **{**pipes, **options})


def test_a_command_runs_in_the_task(stack: Up) -> None:
    """With pipes: streams apart, binary-safe, and its status is that of the command."""
    id_ = running(stack)
    data = bytes(range(256)) * 4000
    script = "echo hi; echo err >&2; cat; exit 7"
    out, err = (process := command(stack, "exec", id_, "--", "sh", "-c", script)).communicate(data, 60)
    assert (process.returncode, out, err) == (7, b"hi\n" + data, b"err\n")
    stack.client().cancel(id_)
