"""Tasks of an elastic job continue with another number of tasks: judged by what they write."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from agent.launch import environment
from domain.launch import CheckpointLaunch, JobLaunch, LaunchDescription, TaskPlace
from mizzen.checkpoint import open_checkpoints

ROOT = Path(__file__).resolve().parent.parent.parent
JOB = ROOT / "tests" / "stack" / "elastic_job.py"


def _attempt(folder: Path, attempt: int, tasks: int, saved_tasks: int | None) -> list[list[str]]:
    """Runs an attempt until a checkpoint is newer than at its start, and stops it; returns what its tasks wrote."""
    root = folder / "root"
    places = tuple(
        TaskPlace(job="train", task=k, machine="m", rank=k, world_size=tasks, node_rank=0, local_rank=k,
                  local_world_size=tasks)
        for k in range(tasks)
    )  # fmt: skip
    job = JobLaunch(
        role="train", tasks=tasks, master_machine="m", argv=("train",), min_tasks=2, max_tasks=4,
        saved_tasks=saved_tasks,
    )  # fmt: skip
    launch = LaunchDescription(
        workload_id="wl-1", name="w", tenant="t", tenant_number=0, attempt=attempt, region="r",
        checkpoint=CheckpointLaunch(uri=f"file://{root}/", keep=2, interval_s=0.2, grace_s=20.0), jobs={"train": job},
        tasks=places,
    )  # fmt: skip
    journal, gate, before = folder / f"journal-{attempt}", folder / "gate", _newest(root)
    processes = []
    for place in places:
        own = folder / f"{attempt}.{place.task}"
        own.mkdir()
        env = environment(
            launch, place, masters={}, home=own, report=own / "report.json", interval_file=own / "interval",
            deadline_file=own / "deadline", python=sys.executable, secrets={}, user="1",
        )  # fmt: skip
        command = [sys.executable, str(JOB), str(journal), str(gate)]
        processes.append(subprocess.Popen(command, env=env | {"PYTHONPATH": str(ROOT / "sdk")}, cwd=own))
    try:
        deadline_s = time.monotonic() + 100
        while _newest(root) < before + 3 or len(_lines(journal)) < tasks:
            assert time.monotonic() < deadline_s and all(one.poll() is None for one in processes)
            time.sleep(0.05)
        for one in processes:
            os.kill(one.pid, signal.SIGTERM)
        assert [one.wait(60) for one in processes] == [143] * tasks
    finally:
        for one in processes:
            one.kill()
            one.wait()
    return sorted(_lines(journal))


def _newest(root: Path) -> int:
    found = [one.step for one in open_checkpoints(f"file://{root}/").list()] if (root / "log").exists() else []
    return max(found, default=0)


def _lines(journal: Path) -> list[list[str]]:
    return [line.split() for line in journal.read_text().splitlines()] if journal.exists() else []


def test_tasks_resume_with_another_number(tmp_path: Path) -> None:
    """Two tasks start and save, four continue from their checkpoint, and then two from that of the four."""
    first = _attempt(tmp_path, 1, 2, None)
    assert first == [[str(rank), "2", "None", "False", "0", "2"] for rank in range(2)]
    step = _newest(tmp_path / "root")
    more = _attempt(tmp_path, 2, 4, 2)
    assert more == [[str(rank), "4", "2", "True", str(step), "4"] for rank in range(4)] and step >= 3
    step = _newest(tmp_path / "root")
    assert _attempt(tmp_path, 3, 2, 4) == [[str(rank), "2", "4", "True", str(step), "2"] for rank in range(2)]
