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


@pytest.mark.rotating
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


@pytest.mark.rotating
def test_tasks_of_a_gang_and_elements_of_an_array(shared: Up, tmp_path: Path) -> None:
    """Each task has its own output, in a folder of its own if there are several. What is missing is explained."""
    gang = submitted(
        shared, "mkdir out; echo $RANK >out/rank; [ $RANK = 0 ] && echo best >best || true", job={"tasks": 2},
        outputs={"model": "out", "best": "best", "none": "none"},
    )  # fmt: skip
    array = submitted(shared, "mkdir out; echo $MIZZEN_ARRAY_INDEX >out/index", array="3-4")
    client = shared.client()
    assert [one["phase"] for one in client.wait([gang, array])] == ["succeeded", "succeeded"]
    assert got(shared, tmp_path, gang, "model")[0] == 0
    assert [(tmp_path / "model" / f"main.{n}" / "rank").read_text() for n in (0, 1)] == ["0\n", "1\n"]
    assert got(shared, tmp_path, gang, "model", "--task", "1", "--to", "one")[0] == 0
    assert (tmp_path / "one" / "rank").read_text() == "1\n"
    assert got(shared, tmp_path, gang, "best")[0] == 0
    assert (tmp_path / "best" / "best").read_text() == "best\n"
    code, _, err = got(shared, tmp_path, gang, "model")
    assert code == 2 and "model/main.0 exists and is not an empty folder" in err.replace("\n", " ")
    code, _, err = got(shared, tmp_path, gang, "none")
    assert code == 2 and "no task has stored none" in err.replace("\n", " ")
    assert [reason["code"] for reason in client.why(gang)["reasons"]] == ["completed", "outputs_not_stored"]
    shown = ended(mizzen(shared, tmp_path, "show", gang))[1]
    assert "best of main/0, attempt 1: 5 B, stored" in shown
    assert "none of main/0 was not stored: none does not exist" in shown
    assert got(shared, tmp_path, f"{array}/4", "model", "--to", "four")[0] == 0
    assert (tmp_path / "four" / "index").read_text() == "4\n"
    code, _, err = got(shared, tmp_path, array, "model", "--to", "all")
    assert code == 2 and "is an array" in err
