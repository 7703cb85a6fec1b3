"""Dependencies on a running stack: `--after` and `--not-before`, and the ends of chains."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stack.harness import Up, wait_until
from tests.stack.test_run import ended, mizzen

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]


@pytest.fixture
def run(shared: Up, tmp_path: Path) -> Callable[..., str]:
    """A function that submits a shell script with `mizzen run --detach` and returns the workload's id."""

    def submit(name: str, script: str, *options: str) -> str:
        fixed = ("--tenant", "t", "--name", name, "--no-files", "--detach", "--cpus", "0.1", "--memory", "64MiB")
        code, out, err = ended(mizzen(shared, tmp_path, "run", *fixed, *options, "--", "sh", "-c", script))
        assert code == 0, err
        return out.strip()

    return submit


@pytest.mark.rotating
def test_dependents_start_after_their_predecessors(shared: Up, tmp_path: Path, run: Callable[..., str]) -> None:
    """A diamond runs in its order, each when the other has ended; a failure ends what waits for a success."""
    gate = tmp_path / "gate"
    first = run("first", f"while ! test -e {gate}; do sleep 0.1; done")
    left = run("left", "echo left", "--after", "first")
    right = run("right", "exit 3", "--after", f"{first}:started", "--not-before", "1s")
    last = run("last", "echo last", "--after", "left", "--after", "right:failed")
    never = run("never", "echo never", "--after", "right")
    wait_until(lambda: shared.phase(right) == "failed", "right has failed while first runs")
    assert shared.phase(first) == "running" and shared.phase(left) == "pending"
    code, out, _ = ended(mizzen(shared, tmp_path, "why", last))
    assert code == 0 and f"waits until left ({left}) has succeeded; it is pending" in out
    gate.touch()
    done = {workload["id"]: workload for workload in shared.client().wait([first, left, last, never])}
    assert {id_: workload["phase"] for id_, workload in done.items()} == {
        first: "succeeded", left: "succeeded", last: "succeeded", never: "cancelled",
    }  # fmt: skip
    assert done[never]["reason"]["code"] == "dependency_never"
    started = [shared.client().attempts(id_)[0]["awarded_at"] for id_ in (first, left, last)]
    assert started == sorted(started)
    code, out, _ = ended(mizzen(shared, tmp_path, "show", last))
    assert f"left ({left}, succeeded) has succeeded: met" in out


def test_documents_of_one_file_depend_on_each_other(shared: Up, tmp_path: Path) -> None:
    """A document may name one before it, although none exists before all are checked."""

    def document(name: str, **more: object) -> str:
        job = {"name": "main", "run": "true", "resources": {"cpus": 0.1, "memory": "64MiB"}}
        return json.dumps({"version": 1, "name": name, "tenant": "t", "jobs": [job], **more})

    (tmp_path / "both.yaml").write_text(
        f"{document('chained-1')}\n---\n{document('chained-2', after=['chained-1', 'chained-1:ended'])}"
    )
    code, out, err = ended(mizzen(shared, tmp_path, "submit", "both.yaml", "--wait", "-o", "name"))
    assert code == 0, err
    first, second = out.split()
    assert [one["predecessor"] for one in shared.client().workload(second)["after"]] == [first, first]
