"""Tasks that take too much memory, disk or processes, in every mode of isolation; others go on."""

from functools import partial

import pytest

from domain.reasons import ReasonCode
from infra.config.scheduling import TaskSettings
from tests.isolation.conftest import LOG_BYTES, PATIENCE_S, Engine, submit
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
_MUCH_BYTES = 256 << 20
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
    takes = [
        (ReasonCode.OUT_OF_DISK, "while :; do head -c 20000000 /dev/zero >> file; sleep 0.02; done"),
        (ReasonCode.OUT_OF_DISK, "n=0; while :; do : > $n; n=$((n + 1)); done"),
    ]
    if mode != "sandbox of an ordinary user":  # Only cgroups limit memory, and this user may not make any.
        takes.append((ReasonCode.OUT_OF_MEMORY, """exec "$MIZZEN_PYTHON" -c 'x = b"x" * (1 << 30)'"""))
    client = stack.client()
    for reason, run in takes:
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


def test_a_flood_of_output_fills_no_disk(stack: Up, engine: Engine | None) -> None:
    """Neither that of the machine nor the bucket; the output of another tenant's task still arrives."""
    image = None if engine is None else engine.image
    other = submit(stack, "victim", "n=0; while :; do echo $n; n=$((n + 1)); sleep 0.2; done", image)
    # The second one writes as fast as it can.
    floods = {
        submit(stack, "intruder", run, image): run
        for run in ("while :; do head -c 3000000 /dev/zero | tr '\\0' x; echo; sleep 0.1; done", "exec yes")
    }
    slow, fast = floods
    client = stack.client()

    def is_bounded() -> bool:
        [output] = stack.data.glob(f"machines/*/runs/{slow}.1/*/output.log")
        status = output.stat()
        return status.st_size > _MUCH_BYTES and status.st_blocks * 512 < _MUCH_BYTES // 4

    wait_until(lambda: _stored_bytes(stack, slow) >= LOG_BYTES, "the log has its limit", PATIENCE_S)
    wait_until(is_bounded, "the output on the machine has its limit", PATIENCE_S)
    seen = len(list(client.logs(other)))
    wait_until(lambda: len(list(client.logs(other))) > seen, "the other task's output arrives", PATIENCE_S)
    assert stack.phase(slow) == "running"
    for workload in (slow, fast, other):
        if stack.phase(workload) != "failed":
            client.cancel(workload)
    for workload in floods:
        wait_until(partial(_is_over, stack, workload), "the flood has ended", PATIENCE_S)
        assert b"output is missing" in b"".join(client.logs(workload, follow=True))
        assert _stored_bytes(stack, workload) < 3 * LOG_BYTES, "the limit, and the end of the output"
    why = client.workload(fast)["reason"]
    assert stack.phase(fast) == "cancelled" or (why is not None and why["code"] == ReasonCode.OUT_OF_DISK), why


def _is_over(up: Up, workload: str) -> bool:
    return up.phase(workload) in ("failed", "cancelled")


def _stored_bytes(up: Up, workload: str) -> int:
    return sum(path.stat().st_size for path in up.data.glob(f"buckets/*/logs/{workload}/**/*.log"))
