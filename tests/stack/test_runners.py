"""Runners of arrays on a running stack: what elements leave, with failures, cancels, stops and lost processes."""

from pathlib import Path

import pytest

from tests.stack.harness import Up
from tests.stack.test_arrays import _mizzen

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]
_SHORT = """
version: 1
name: short
tenant: t
array: {indexes: 0-99, throttle: 2, runners: true}
jobs:
  - name: main
    resources: {cpus: 0.1, memory: 64MiB}
    run: |
      echo "$MIZZEN_ARRAY_INDEX {{ index }} $MIZZEN_WORKLOAD"
      ls -A /tmp "$PWD"
      touch /tmp/left left
      sleep 600 &
limits: {retries: 1}
"""


def test_elements_follow_each_other(shared: Up, tmp_path: Path) -> None:
    """Each element runs once, with its values, in an empty place; runners are not elements and end with the array."""
    code, out, err = _mizzen(shared, "submit", "-", stdin=_SHORT)
    assert code == 0, err
    array = out.strip()
    assert _mizzen(shared, "wait", array)[0] == 0
    found = shared.client().workload(array)["array"]
    assert found is not None and (found["elements"], found["succeeded"]) == (100, 100)
    for index in (0, 7, 99):
        own = f"{index} {index} {array}-{index}"
        code, out, err = _mizzen(shared, "logs", "-f", f"{array}/{index}")
        lines = out.splitlines()
        assert lines[0] == own and "left" not in out and len(lines) == 4, out
    assert len(list(shared.client().workloads(array=array))) == 100
