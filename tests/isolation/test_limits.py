"""Tasks that take too much memory, disk or processes, in every mode of isolation; others go on."""

from functools import partial

import pytest

from domain.reasons import ReasonCode
from infra.config.scheduling import TaskSettings
from tests.isolation.conftest import PATIENCE_S, Engine, submit
from tests.stack.harness import Up, wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
_FORKS = """
import os, time
made = 0
try:
    while made < 1000 and os.fork():
        made += 1
except OSError:
    print("forks:", made, flush=True)
else:
    time.sleep(5)
"""
_PROCESSES = TaskSettings().processes_per_task + TaskSettings().processes_per_cpu // 2
"""The limit of a task with half a CPU."""


@pytest.fixture(scope="module", params=["sandbox", "none", "user", "sandbox of an ordinary user", "container"])
def mode(request: pytest.FixtureRequest) -> str:
    """The mode of isolation of the stack."""
    return str(request.param)


def _has_failed(up: Up, workload: str) -> bool:
    return up.phase(workload) == "failed"


def test_tasks_that_take_too_much_are_stopped(stack: Up, mode: str, engine: Engine | None) -> None:
    """The reason says of what, and a task of another tenant on the machine goes on."""
    image = None if engine is None else engine.image
    other = submit(stack, "victim", "sleep 600", image)
    wait_until(lambda: stack.phase(other) == "running", "the other task runs")
    takes = {
        ReasonCode.OUT_OF_DISK: "while :; do head -c 20000000 /dev/zero >> file; sleep 0.02; done",
        ReasonCode.OUT_OF_MEMORY: """exec "$MIZZEN_PYTHON" -c 'x = b"x" * (1 << 30)'""",
    }
    if mode == "sandbox of an ordinary user":
        del takes[ReasonCode.OUT_OF_MEMORY]  # Only cgroups limit memory, and this user may not make any.
    client = stack.client()
    for reason, run in takes.items():
        workload = submit(stack, "intruder", run, image)
        wait_until(partial(_has_failed, stack, workload), f"the task is {reason}", PATIENCE_S)
        why = client.workload(workload)["reason"]
        assert why is not None and why["code"] == reason, why
    forks = submit(stack, "intruder", f"""exec "$MIZZEN_PYTHON" -c '{_FORKS}'""", image)
    wait_until(lambda: stack.ended(forks), "the kernel has refused to fork")
    (said,) = {line.decode() for line in client.logs(forks, follow=True) if b"forks:" in line}
    assert int(said.rpartition(" ")[2]) < _PROCESSES
    assert stack.phase(other) == "running"
    client.cancel(other)
    wait_until(lambda: stack.phase(other) == "cancelled", "the other task was cancelled")
