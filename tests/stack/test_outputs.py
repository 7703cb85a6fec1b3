"""Outputs of tasks on a running stack: stored at each end, and fetched by `mizzen get`."""

from pathlib import Path
from typing import Any

import pytest

from tests.stack.harness import Up, wait_until
from tests.stack.test_run import ended, mizzen

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]


def submitted(stack: Up, run: str, **more: Any) -> str:
    """Submits a workload with the output `model`; returns its id."""
    job = {"name": "main", "resources": {"cpus": 0.1, "memory": "64MiB"}, "run": run, **more.pop("job", {})}
    document = {"version": 1, "name": "out", "tenant": "t", "outputs": {"model": "./out"}, "jobs": [job], **more}
    return str(stack.client().submit(document)["id"])


def got(stack: Up, folder: Path, id_: str, *arguments: str) -> tuple[int, str, str]:
    """Runs `mizzen get` in a folder; returns its status and output."""
    return ended(mizzen(stack, folder, "get", id_, *arguments))


def test_outputs_are_fetched_after_success_and_failure(shared: Up, tmp_path: Path) -> None:
    """They are there as soon as the workload has ended; a link in the folder is kept, one out of it is named."""
    script = "mkdir -p out/deep; echo weights >out/deep/w.pt; ln -s deep/w.pt out/last; ln -s /etc/passwd out/leak"
    for status, phase in ((0, "succeeded"), (3, "failed")):
        id_ = submitted(shared, f"{script}; exit {status}")
        assert shared.client().wait([id_])[0]["phase"] == phase
        code, _, err = got(shared, tmp_path, id_, "model", "--to", phase)
        assert code == 0, err
        assert (tmp_path / phase / "last").read_text() == "weights\n"
        assert (tmp_path / phase / "last").readlink() == Path("deep/w.pt")
        assert not (tmp_path / phase / "leak").is_symlink()
        assert "leak: is a link to /etc/passwd" in err


def test_outputs_of_a_preempted_attempt_are_there_while_it_waits(shared: Up, tmp_path: Path) -> None:
    """The next attempt replaces them."""
    script = "mkdir out; echo $MIZZEN_ATTEMPT >out/attempt; trap 'exit 0' TERM; echo ready; sleep 600 & wait"
    id_ = submitted(shared, f"[ $MIZZEN_ATTEMPT = 1 ] || {{ mkdir out; echo second >out/attempt; exit; }}; {script}")
    client = shared.client()
    wait_until(lambda: b"ready" in list(client.logs(id_)), "the task is ready")
    machines = [one["id"] for one in client.machines()]
    for machine in machines:
        client.set_machine(machine, "cordon")
    try:
        client.preempt(id_)
        wait_until(lambda: client.workload(id_)["queued"], "the workload waits")
        wait_until(lambda: client.outputs(id_), "its output is stored")
        code, _, err = got(shared, tmp_path, id_, "model", "--to", "first")
        assert code == 0, err
        assert (tmp_path / "first" / "attempt").read_text() == "1\n"
    finally:
        for machine in machines:
            client.set_machine(machine, "uncordon")
    wait_until(lambda: shared.phase(id_) == "succeeded", "the second attempt has succeeded")
    assert got(shared, tmp_path, id_, "model", "--to", "second")[0] == 0
    assert (tmp_path / "second" / "attempt").read_text() == "second\n"
    assert [one["attempt"] for one in client.outputs(id_)] == [2]
