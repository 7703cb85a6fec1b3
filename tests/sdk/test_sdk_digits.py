"""The example trainer in real gangs of processes: the final weights are the same after any interruptions."""

import hashlib
import importlib.util
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import mizzen
from infra.stack.ports import free_port
from mizzen.checkpoint import list_committed
from tests.depth import examples

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits"
SDK = Path(mizzen.__file__).parents[1]
STEPS = 120
WAIT_S = 60
FINAL = re.compile(r"^final weights sha256=([0-9a-f]{64}) step=(\d+) accuracy=(0\.\d{4})$", re.MULTILINE)


def load(name: str) -> ModuleType:
    """Imports a module of the example by its path, because the example is not a package."""
    spec = importlib.util.spec_from_file_location(f"digits_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Run:
    """One attempt of the gang: its processes, with the environment variables that mizzen sets."""

    def __init__(self, folder: Path, table: Path, attempt: int, world_size: int, *options: str) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        port = free_port()
        self.tasks = []
        for rank in range(world_size):
            told = {
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(SDK),
                "PYTHONDONTWRITEBYTECODE": "1",
                "MIZZEN_WORKLOAD": "wl-test",
                "MIZZEN_JOB": "trainer",
                "MIZZEN_ATTEMPT": str(attempt),
                "MIZZEN_TABLE_DIGITS": f"file://{table}",
                "MIZZEN_CHECKPOINT_URI": f"file://{folder}/checkpoints",
                "MIZZEN_CHECKPOINT_INTERVAL_S": "0.05",
                "MIZZEN_REPORT": str(self.report_path(rank)),
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            self.report_path(rank).unlink(missing_ok=True)
            command = [sys.executable, str(EXAMPLE / "train.py"), "--steps", str(STEPS), *options]
            pipe = subprocess.PIPE
            self.tasks.append(subprocess.Popen(command, env=told, stdout=pipe, stderr=subprocess.STDOUT, text=True))

    def report_path(self, rank: int) -> Path:
        """Returns the path of a rank's report file."""
        return self.folder / f"report-{rank}.json"

    def wait_for_step(self, step: int, rank: int = 0) -> None:
        """Waits until a rank has reported `step` or a later one, or has ended."""
        deadline_s = time.monotonic() + WAIT_S
        while self.tasks[rank].poll() is None:
            path = self.report_path(rank)
            if path.exists() and (json.loads(path.read_text())["step"] or 0) >= step:
                return
            assert time.monotonic() < deadline_s, "the rank did not reach the step in time"
            time.sleep(0.005)

    def end(self) -> tuple[list[int], list[str]]:
        """Waits for all tasks; returns their exit codes and outputs."""
        logs = [task.communicate(timeout=WAIT_S)[0] for task in self.tasks]
        return [task.returncode for task in self.tasks], logs


@contextmanager
def gang(folder: Path, table: Path, attempt: int, *options: str, world_size: int = 2) -> Iterator[Run]:
    """Yields a running gang; kills its remaining processes at the end."""
    run = Run(folder, table, attempt, world_size, *options)
    try:
        yield run
    finally:
        for task in run.tasks:
            if task.poll() is None:
                task.kill()
                task.wait()
            assert task.stdout is not None
            task.stdout.close()


def freeze(run: Run) -> None:
    """Stops all processes of a gang with SIGSTOP."""
    for task in run.tasks:
        task.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, task.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the generated table."""
    folder = tmp_path_factory.mktemp("table")
    load("make_table").make_table(folder)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(table: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the final output line of a gang of two that ran without interruption."""
    with gang(tmp_path_factory.mktemp("whole") / "run", table, 1, "--step-s", "0") as run:
        codes, logs = run.end()
    assert codes == [0, 0], logs
    assert "starting from step 0" in logs[0] and "starting from step 0" in logs[1]
    assert re.search(r"^step 20 loss=\d\.\d{4}$", logs[0], re.MULTILINE)
    final = FINAL.search(logs[0])
    assert final is not None, logs[0]
    assert int(final[2]) == STEPS and float(final[3]) > 0.85
    return final[0]


def test_the_table_is_the_same_bytes_each_time(table: Path, tmp_path: Path) -> None:
    """Generating the table again gives the same bytes: 1797 images with values in 0..1, and their labels."""
    again = load("make_table").make_table(tmp_path)
    assert again.read_bytes() == (table / "digits.npz").read_bytes()
    with np.load(again, allow_pickle=False) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    assert images.shape == (1797, 64) and (images.min(), images.max()) == (0.0, 1.0)
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


@pytest.mark.rotating
def test_killed_at_random_and_resumed_it_ends_the_same(table: Path, uninterrupted: str, tmp_path: Path) -> None:
    """A gang whose processes are killed at random steps in each of some attempts ends with the same weights."""
    chance = random.Random(3)
    folder = tmp_path / "run"
    attempt = resumed = 0
    while attempt < (6 if examples(100) >= 100 else 3):
        attempt += 1
        with gang(folder, table, attempt, "--step-s", "0.005") as run:
            run.wait_for_step(chance.randrange(1, 25) + resumed)
            time.sleep(chance.random() * 0.02)
            for task in chance.sample(run.tasks, 2):
                task.kill()
            codes, logs = run.end()
        committed = list_committed(folder / "checkpoints", verify=True)
        start = re.search(r"resumed from step (\d+)", logs[0])
        assert start is None or int(start[1]) == resumed
        assert resumed <= (committed[0].step if committed else 0)
        resumed = committed[0].step if committed else 0
    assert 0 < resumed <= STEPS
    with gang(folder, table, attempt + 1, "--step-s", "0") as run:
        codes, logs = run.end()
    assert codes == [0, 0], logs
    assert f"resumed from step {resumed}" in logs[0] and f"resumed from step {resumed}" in logs[1]
    assert uninterrupted in logs[0]


@pytest.mark.rotating
def test_told_to_stop_it_saves_exits_and_goes_on(table: Path, uninterrupted: str, tmp_path: Path) -> None:
    """A notice to any rank stops all ranks at the same step with exit code 143; the next attempt resumes there."""
    folder = tmp_path / "run"
    stopped = 0
    for attempt, rank, step in [(1, 0, 10), (2, 1, 40)]:
        with gang(folder, table, attempt, "--step-s", "0.02") as run:
            run.wait_for_step(step, rank)
            run.tasks[rank].send_signal(signal.SIGTERM)
            codes, logs = run.end()
        assert codes == [143, 143], logs
        assert ("resumed from step" in logs[0]) == (attempt > 1)
        found = re.search(r"^preempted: saved at step (\d+)$", logs[0], re.MULTILINE)
        assert found is not None and int(found[1]) > max(stopped, step - 1)
        stopped = int(found[1])
        assert list_committed(folder / "checkpoints")[0].step == stopped
        reports = [json.loads(run.report_path(rank).read_text()) for rank in range(2)]
        assert [report["step"] for report in reports] == [stopped, stopped]
        assert reports[0]["checkpoint"]["step"] == stopped and reports[1]["checkpoint"] is None
    with gang(folder, table, 3, "--step-s", "0") as run:
        codes, logs = run.end()
    assert codes == [0, 0], logs
    assert f"resumed from step {stopped}" in logs[0] and uninterrupted in logs[0]

    # If a finished training is started again, each rank exits at once, without waiting for the others.
    newest = list_committed(folder / "checkpoints")[0]
    with gang(folder, table, 4, world_size=2) as run:
        codes, logs = run.end()
    assert codes == [0, 0], logs
    assert uninterrupted in logs[0]
    assert list_committed(folder / "checkpoints")[0] == newest
    (key,) = (part.key for part in newest.parts if part.name == "final")
    final = json.loads((folder / "checkpoints" / key).read_text())
    assert f"sha256={final['weights_sha256']} step={final['step']} accuracy={final['accuracy']:.4f}" in uninterrupted


def test_told_to_stop_while_it_waits_for_the_others(table: Path, tmp_path: Path) -> None:
    """A rank that gets SIGTERM while it waits for its gang exits with 143 immediately."""
    with gang(tmp_path / "run", table, 1, world_size=3) as run:
        run.tasks[2].kill()
        for rank in (0, 1):
            while run.tasks[rank].poll() is None and not run.report_path(rank).exists():
                time.sleep(0.01)
            run.tasks[rank].send_signal(signal.SIGTERM)
        codes, logs = run.end()
    assert codes == [143, 143, -signal.SIGKILL], logs
    assert "stopped while waiting for" in logs[0]


@pytest.mark.parametrize("dies", [0, 1])
def test_the_death_of_one_ends_the_others(table: Path, tmp_path: Path, dies: int) -> None:
    """When a rank is killed, the other ranks detect it and exit with an error."""
    with gang(tmp_path / "run", table, 1, "--steps", "100000", world_size=3) as run:
        run.wait_for_step(5, rank=2)
        run.tasks[dies].kill()
        codes, logs = run.end()
    assert codes[dies] == -signal.SIGKILL
    assert [code for rank, code in enumerate(codes) if rank != dies] == [1, 1], logs
    assert f"rank {dies} is gone" in logs[1 - dies]


def test_other_options_than_the_checkpoint_has_are_refused(table: Path, tmp_path: Path) -> None:
    """A run with another seed than its checkpoint is refused."""
    folder = tmp_path / "run"
    with gang(folder, table, 1, "--step-s", "0", world_size=1) as run:
        assert run.end()[0] == [0]
    with gang(folder, table, 2, "--seed", "1", world_size=1) as run:
        codes, logs = run.end()
    assert codes == [2] and "seed is 1 but was 0 in the checkpoint" in logs[0]


def test_a_zombie_of_an_earlier_attempt_cannot_join_or_commit(table: Path, uninterrupted: str, tmp_path: Path) -> None:
    """A gang that was frozen during the whole next attempt fails after it is thawed, and commits nothing."""
    folder = tmp_path / "run"
    with gang(folder, table, 1, "--step-s", "0.01") as zombie:
        zombie.wait_for_step(20)
        freeze(zombie)
        with gang(folder, table, 2, "--step-s", "0") as run:
            codes, logs = run.end()
        assert codes == [0, 0] and uninterrupted in logs[0], logs
        newest = list_committed(folder / "checkpoints")
        for task in zombie.tasks:
            task.send_signal(signal.SIGCONT)
        codes, logs = zombie.end()
    assert codes == [1, 1], logs
    assert "StaleAttemptError" in logs[0]
    assert list_committed(folder / "checkpoints")[0] == newest[0]
    assert not list((folder / "checkpoints" / ".staging").iterdir())


def test_sums_are_the_same_bytes_whoever_comes_first() -> None:
    """Sums are bit-identical on all ranks in any order of arrival, although rounding depends on the order."""
    allreduce = load("allreduce")
    world_size, rounds = 4, 6
    chance = random.Random(5)
    rows = np.random.default_rng(1).standard_normal((world_size, 500)) * 10.0 ** np.arange(-8, 12, 0.04)
    pauses = [[chance.random() * 0.01 for _ in range(rounds)] for _ in range(world_size)]
    address = ("127.0.0.1", free_port())
    digests: list[str] = []

    def take_part(rank: int) -> None:
        limits = {"deadline_s": 30.0, "silence_s": 30.0}
        with allreduce.join(rank, world_size, address, "t", stop=lambda: False, **limits) as joined:
            for pause_s in pauses[rank]:
                time.sleep(pause_s)
                digests.append(hashlib.sha256(joined.sum(rows[rank]).tobytes()).hexdigest())

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    expected = hashlib.sha256((((rows[0] + rows[1]) + rows[2]) + rows[3]).tobytes()).hexdigest()
    assert digests == [expected] * world_size * rounds


def test_strangers_cannot_join() -> None:
    """Connections without the gang's token, with another gang size, or without a valid hello do not join the gang."""
    allreduce = load("allreduce")
    address = ("127.0.0.1", free_port())
    sums: list[float] = []

    def take_part(rank: int) -> None:
        with allreduce.join(rank, 2, address, "mine", deadline_s=30, silence_s=30, stop=lambda: False) as joined:
            sums.append(float(joined.sum(np.array([rank + 1.0]))[0]))

    first = threading.Thread(target=take_part, args=(0,))
    first.start()
    for token, world_size in [("another", 2), ("mine", 3)]:
        with pytest.raises(allreduce.GangError, match="waited"):
            allreduce.join(1, world_size, address, token, deadline_s=0.3, silence_s=1, stop=lambda: False)
    for raw in (b"", b"GET / HTTP/1.1\r\n\r\n" + b"x" * 32):
        with socket.create_connection(address) as stranger:
            stranger.sendall(raw)
    second = threading.Thread(target=take_part, args=(1,))
    second.start()
    first.join(WAIT_S)
    second.join(WAIT_S)
    assert sums == [3.0, 3.0]
