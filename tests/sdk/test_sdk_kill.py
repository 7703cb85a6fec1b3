"""If SIGKILL arrives at any time during a save, the newest committed checkpoint loads."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mizzen.checkpoint import Checkpointer, list_committed
from tests.depth import examples


def _state(step: int, size: int = 3000) -> dict[str, object]:
    return {"raw": step.to_bytes(4, "big") * size, "progress": {"step": step}, "frozen": b"always the same" * size}


def test_killed_before_any_file_operation_of_a_save(tmp_path: Path, fork: Callable[..., Any]) -> None:
    """A kill before any file operation of claim, save or removal leaves one intact checkpoint.

    It is the new checkpoint if its save returned, else the new or the old one. The next load removes leftover files.
    By default every seventh operation is tried.
    """
    seen: set[int] = set()
    for event in range(1, 500, 1 if examples(100) >= 100 else 7):
        root = tmp_path / str(event)
        Checkpointer(root, attempt=1, keep=1).save(1, _state(1))

        def work(tell: Callable[[bytes], None], root: Path = root) -> None:
            checkpointer = Checkpointer(root, attempt=2, keep=1)
            checkpointer.load_latest()  # So that the save takes over the part that has not changed.
            checkpointer.save(2, _state(2))
            tell(b"committed")

        child = fork(work, event)
        code, said = child.end(), child.said()
        found = Checkpointer(root, attempt=3).load_latest()
        assert found is not None
        assert found.state == _state(found.step)
        assert found.step == 2 or not said
        seen.add(found.step)
        needed = {root / key for manifest in list_committed(root) for key in manifest.keys}
        rest = {path for path in root.rglob("*") if path.is_file() and path.parent.name != "log"}
        assert rest == needed, f"event {event}"
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert event > 30, "the audit hook recorded too few file operations"
    assert seen == {1, 2}


@pytest.mark.long
def test_killed_at_random_while_it_saves_on_and_on(tmp_path: Path, fork: Callable[..., Any]) -> None:
    """After each of 40 random kills, the newest checkpoint is intact and no older than the last acknowledged one."""
    chance = random.Random(20)
    step = 0
    for attempt in range(1, 41):

        def work(tell: Callable[[bytes], None], attempt: int = attempt, start: int = step) -> None:
            checkpointer = Checkpointer(tmp_path, attempt=attempt, keep=2)
            number = start
            while True:
                number += 1
                checkpointer.save(number, _state(number, 50_000))
                tell(number.to_bytes(4, "big"))

        child = fork(work)
        first = b"".join(os.read(child.pipe, 4) for _ in range(1 + attempt % 2))
        time.sleep(chance.random() * 0.02)
        os.kill(child.pid, signal.SIGKILL)
        assert child.end() == -signal.SIGKILL
        acknowledged = int.from_bytes((first + child.said())[-4:], "big")
        found = list_committed(tmp_path, verify=True)[0]
        assert found.step in (acknowledged, acknowledged + 1)
        loaded = Checkpointer(tmp_path, attempt=attempt + 1).load_latest()
        assert loaded is not None and loaded.step == found.step
        assert loaded.state == _state(loaded.step, 50_000)
        step = loaded.step
    assert step >= 60
