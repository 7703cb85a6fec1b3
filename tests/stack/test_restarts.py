"""`restart: task` and one `setup` for each machine, from a document to the tasks of a running stack."""

from pathlib import Path
from typing import Any

import pytest

from tests.stack.harness import Up

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]
_FAILS_ONCE = """
cat made
echo "$RANK runs" >> {marks}
if [ "$RANK" = 1 ] && [ "$(grep -c '1 runs' {marks})" -le {failures} ]; then exit 7; fi
while [ "$(sort -u {marks} | wc -l)" -lt 3 ]; do sleep 0.1; done
"""


def _ends(stack: Up, marks: Path, failures: int, retries: object) -> Any:
    """Runs a gang of two tasks on one machine, of which one fails several times; returns the ended workload."""
    job = {
        "name": "main", "tasks": 2, "restart": "task", "resources": {"cpus": 0.1, "memory": "64MiB"},
        "setup": f"echo setup >> {marks}; echo from the setup > made",
        "run": _FAILS_ONCE.format(marks=marks, failures=failures),
    }  # fmt: skip
    document = {"version": 1, "name": "gang", "tenant": "t", "jobs": [job], "limits": {"retries": retries}}
    made = stack.client().submit(document)
    (done,) = stack.client().wait([made["id"]])
    return done


def test_a_failed_task_restarts_alone(shared: Up, tmp_path: Path) -> None:
    """The other task runs on, the setup is not repeated, and the workload succeeds in its first attempt."""
    marks = tmp_path / "marks"
    done = _ends(shared, marks, 2, {"exit": {"7": 2}})
    assert (done["phase"], done["attempt"]) == ("succeeded", 1), done["reason"]
    assert sorted(marks.read_text().splitlines()) == ["0 runs", "1 runs", "1 runs", "1 runs", "setup"]
    log = b"".join(shared.client().logs(done["id"], follow=True)).decode()
    assert log.count("from the setup") == 4
    assert "ended with exit code 7 and is started again: restart 2 of 2" in log


def test_the_limit_of_restarts_ends_the_workload(shared: Up, tmp_path: Path) -> None:
    """The reason names the status and the limit; no second attempt begins."""
    done = _ends(shared, tmp_path / "marks", 9, {"exit": {"7": 1, "other": 5}})
    assert (done["phase"], done["attempt"]) == ("failed", 1)
    assert done["reason"]["sentence"] == (
        "task main/1 ended with exit code 7 and its 1 retry is used up for exit status 7"
    )
