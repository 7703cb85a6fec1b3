"""Runners of arrays on a running stack: what elements leave, with failures, cancels, stops and lost processes."""

from pathlib import Path

import pytest

from tests.stack.harness import Up, wait_until
from tests.stack.test_arrays import _mizzen

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]
_SHORT = """
version: 1
name: short
tenant: t
array:
  list: [SQUARES]
  throttle: 2
  runners: true
jobs:
  - name: main
    resources: {cpus: 0.1, memory: 64MiB}
    run: |
      echo "$MIZZEN_ARRAY_INDEX {{ index }} {{ square }} $MIZZEN_PARAM_SQUARE $MIZZEN_WORKLOAD"
      ls -A
      touch left
      sleep 600 &
limits: {retries: 1}
""".replace("SQUARES", ", ".join(f"{{square: {n * n}}}" for n in range(100)))


@pytest.mark.rotating
def test_elements_follow_each_other(shared: Up, tmp_path: Path) -> None:
    """Each element runs once, with its values, in an empty place; runners are not elements and end with the array."""
    code, out, err = _mizzen(shared, "submit", "-", stdin=_SHORT)
    assert code == 0, err
    array = out.strip()
    assert _mizzen(shared, "wait", array)[0] == 0
    found = shared.client().workload(array)["array"]
    assert found is not None and (found["elements"], found["succeeded"]) == (100, 100)
    for index in (0, 7, 99):
        own = f"{index} {index} {index**2} {index**2} {array}-{index}"
        code, out, err = _mizzen(shared, "logs", "-f", f"{array}/{index}")
        lines = out.splitlines()
        assert lines == [own], out
    assert len(list(shared.client().workloads(array=array))) == 100


_WRITES = """
version: 1
name: writes
tenant: t
array: {indexes: 0-9, throttle: 1, runners: %s}
jobs:
  - name: main
    resources: {cpus: 0.1, memory: 64MiB}
    run: |
      echo "attempt $MIZZEN_ATTEMPT"
      case $MIZZEN_ARRAY_INDEX in
      2) test "$MIZZEN_ATTEMPT" = 2 ;;
      3) exit 3 ;;
      5) touch begun; sleep 600 ;;
      esac
checkpoint: {grace: 4s}
limits: {retries: 1}
"""


def _until_running(stack: Up, element: str) -> None:
    wait_until(lambda: stack.client().workload(element)["phase"] == "running", f"{element} runs")


def test_failures_are_tried_again_and_one_element_is_cancelled(shared: Up) -> None:
    """A failed element is leased again as often as its limits say; a cancelled one ends alone, and the others go on."""
    code, out, err = _mizzen(shared, "submit", "-", stdin=_WRITES % "true")
    assert code == 0, err
    array = out.strip()
    _until_running(shared, f"{array}-5")
    seen = "exec", f"{array}/5", "--", "test", "-e", "begun"
    wait_until(lambda: _mizzen(shared, *seen)[0] == 0, "a session in the runner's sandbox sees the element's files")
    why = _mizzen(shared, "why", array)[1]  # The one runner has leased the rest, or a part of it.
    assert "the throttle of the array is 1" in why or "none of its elements waits" in why
    assert _mizzen(shared, "cancel", f"{array}/5")[0] == 0
    wait_until(lambda: shared.phase(array) == "failed", "the array ends")
    phases = {row["element"]["index"]: row["phase"] for row in shared.client().workloads(array=array) if row["element"]}
    assert phases == dict.fromkeys(range(10), "succeeded") | {3: "failed", 5: "cancelled"}
    assert [shared.client().workload(f"{array}-{k}")["attempt"] for k in (1, 2, 3)] == [1, 2, 2]
    assert "attempt 2" in _mizzen(shared, "logs", "-f", f"{array}/3")[1]
    reason = shared.client().workload(f"{array}-3")["reason"]
    assert reason is not None and reason["code"] == "retries_exhausted"


@pytest.mark.parametrize("once", ["false", "true"])
def test_a_preempted_runner_returns_its_elements(shared: Up, once: str) -> None:
    """A stop leaves no element half done: the one that ran is leased again, or fails if it may be started only once."""
    settings = f"{{interrupt: now, at_most_once: {once}}}"
    document = _WRITES.replace("retries: 1", "retries: 0" if once == "true" else "retries: 1")
    code, out, err = _mizzen(shared, "submit", "-", stdin=document % settings)
    assert code == 0, err
    array, client = out.strip(), shared.client()
    _until_running(shared, f"{array}-5")
    client.preempt(f"{array}-r0")
    if once == "true":
        wait_until(lambda: shared.phase(array) == "failed", "the array ends")
        reason = client.workload(f"{array}-5")["reason"]
        assert reason is not None and reason["code"] == "at_most_once"
        return
    wait_until(lambda: client.workload(f"{array}-5")["attempt"] > 1, "it is leased again")
    assert _mizzen(shared, "cancel", array)[0] == 0
    wait_until(lambda: shared.phase(array) == "cancelled", "the array ends")


@pytest.mark.long
def test_a_killed_agent_finds_its_lane_again(shared: Up) -> None:
    """The lane goes on without its agent; the next one reads the journal, and no element is repeated."""
    text = _SHORT.replace("0-99", "0-19").replace("sleep 600 &", "sleep 0.5").replace("short", "killed")
    code, out, err = _mizzen(shared, "submit", "-", stdin=text)
    assert code == 0, err
    array = out.strip()
    wait_until(lambda: (shared.client().workload(array)["array"] or {}).get("succeeded", 0) > 2, "some have ended")
    shared.kill("-m server agents")
    wait_until(lambda: shared.phase(array) == "succeeded", "the array ends")
    assert {row["attempt"] for row in shared.client().workloads(array=array)} == {1}
