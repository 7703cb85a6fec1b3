"""Workloads that are awarded together on a running stack: short ones share a workflow, and others get their own."""

import pytest

from infra.temporal_client import connect
from tests.stack.harness import Up, wait_until
from tests.stack.test_arrays import _mizzen

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]
_TOGETHER = """
version: 1
name: together
tenant: t
array: {indexes: 0-5}
jobs:
  - name: main
    resources: {cpus: 0.1, memory: 64MiB}
    run: |
      echo "attempt $MIZZEN_ATTEMPT"
      case $MIZZEN_ARRAY_INDEX in
      0) sleep 12 ;;
      1) sleep 600 ;;
      2) test "$MIZZEN_ATTEMPT" = 2 ;;
      3) exit 3 ;;
      esac
limits: {retries: 1}
"""


@pytest.mark.rotating
async def test_short_ones_share_a_workflow(shared: Up) -> None:
    """Awarded together, each ends as it would alone: at once, late, cancelled, at a second attempt, or failed."""
    code, out, err = _mizzen(shared, "submit", "-", stdin=_TOGETHER)
    assert code == 0, err
    array, client = out.strip(), shared.client()
    wait_until(lambda: client.workload(f"{array}-1")["phase"] == "running", "the one that is to be cancelled runs")
    assert _mizzen(shared, "cancel", f"{array}/1")[0] == 0
    wait_until(lambda: client.workload(f"{array}-1")["phase"] == "cancelled", "it is cancelled while others run")
    assert client.workload(f"{array}-0")["phase"] == "running"
    wait_until(lambda: shared.phase(array) == "failed", "the array ends")
    ends = {k: client.workload(f"{array}-{k}") for k in range(6)}
    assert [(ends[k]["phase"], ends[k]["attempt"]) for k in range(6)] == [
        ("succeeded", 1), ("cancelled", 1), ("succeeded", 2), ("failed", 2), ("succeeded", 1), ("succeeded", 1),
    ]  # fmt: skip
    assert _mizzen(shared, "logs", f"{array}/4")[1] == "attempt 1\n"
    temporal = await connect(shared.temporal)
    own = [found.id async for found in temporal.list_workflows("WorkflowType = 'WorkloadWorkflow'")]
    assert [k for k in range(6) if f"workload/{array}-{k}" in own] == [0, 1, 2, 3]
    bundles = [found async for found in temporal.list_workflows("WorkflowType = 'BundleWorkflow'")]
    assert bundles and all(found.close_time is not None for found in bundles)
