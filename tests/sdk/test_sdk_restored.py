"""The first save after a restore: parts that were loaded and have not changed are not sent again."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mizzen import notices
from mizzen.checkpoint import Checkpointer, CheckpointWarning, Manifest, list_committed
from mizzen.checkpoint.roots import open_root

FROZEN = np.arange(300_000.0)


def _state(step: int) -> dict[str, object]:
    return {"frozen": FROZEN, "head": np.full(1000, float(step)), "progress": {"step": step}}


def _sent_bytes(root: str | Path, attempt: int) -> int:
    """Returns how many bytes of the stored parts an attempt has written."""
    found = open_root(root).list(f"parts/a{attempt:04d}/")
    return sum(info.size_bytes for info in found if "/part-" in info.key)


def _key(manifest: Manifest) -> str:
    return next(part.key for part in manifest.parts if part.name == "frozen")


def test_each_attempt_sends_only_what_has_changed(s3_url: str) -> None:
    """Over several attempts the unchanged part stays where it is, although older checkpoints are removed."""
    Checkpointer(s3_url, attempt=1, keep=1).save(1, _state(1))
    assert _sent_bytes(s3_url, 1) > FROZEN.nbytes
    for attempt in (2, 3, 4):
        checkpointer = Checkpointer(s3_url, attempt=attempt, keep=1)
        found = checkpointer.load_latest()
        assert found is not None and found.step == attempt - 1
        saved = checkpointer.save(attempt, _state(attempt))
        assert saved.sent_bytes == _sent_bytes(s3_url, attempt) < 10_000
        assert [m.step for m in list_committed(s3_url, verify=True)] == [attempt]
    assert _key(saved).startswith("parts/a0001/")
    # A process that has loaded nothing has verified nothing, and sends everything.
    Checkpointer(s3_url, attempt=5, keep=1).save(5, _state(5))
    assert _sent_bytes(s3_url, 5) > FROZEN.nbytes
    assert _sent_bytes(s3_url, 1) == 0


def test_after_a_restore_nothing_that_is_stored_is_sent_ahead(
    tmp_path: Path, under_an_agent: Callable[[float], None]
) -> None:
    """Within a notice, a part that was taken over from the restored checkpoint is no reason for a save ahead."""

    def begin(attempt: int) -> Checkpointer:
        notices.unwatch()
        checkpointer = Checkpointer(tmp_path / "root", attempt=attempt, keep=9, background=True)
        checkpointer.track(frozen={"w": FROZEN}, head=head)
        return checkpointer

    head = {"w": np.zeros(1000)}
    first = begin(1)
    first.save(1, first._tracked.capture(1))
    checkpointer = begin(2)
    assert checkpointer.restore() == 1
    step = 1

    def train(steps: int) -> None:
        nonlocal step
        for _ in range(steps):
            step += 1
            head["w"] += 1
            time.sleep(0.002)
            checkpointer.step(step)

    train(6)
    saved = checkpointer.save(step, checkpointer._tracked.capture(step))
    assert saved.sent_bytes < FROZEN.nbytes / 10
    train(6)
    under_an_agent(300.0)
    with pytest.raises(SystemExit):
        train(1000)
    assert step <= 15, "at most two steps are done, to compare"
    assert [m.step for m in list_committed(tmp_path / "root", verify=True)] == [step, 7, 1]


def test_a_part_that_has_changed_is_sent(tmp_path: Path) -> None:
    """A part of the same size, of which one number differs, is written."""
    Checkpointer(tmp_path, attempt=1).save(1, _state(1))
    checkpointer = Checkpointer(tmp_path, attempt=2)
    assert checkpointer.load_latest() is not None
    changed = FROZEN.copy()
    changed[123_456] += 1
    checkpointer.save(2, {**_state(2), "frozen": changed})
    found = Checkpointer(tmp_path, attempt=3).load_latest()
    assert found is not None and (found.state["frozen"] == changed).all()


@pytest.mark.parametrize("copies", [True, False], ids=["another copy", "no copy"])
def test_a_part_that_was_damaged_is_sent_again(tmp_path: Path, copies: bool) -> None:
    """If the newest checkpoint is damaged, the next save does not refer to the damaged part."""
    Checkpointer(tmp_path, attempt=1, keep=9).save(1, _state(1) if copies else {**_state(1), "frozen": FROZEN + 1})
    damaged = Checkpointer(tmp_path, attempt=2, keep=9).save(2, _state(2))
    path = tmp_path / _key(damaged)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    checkpointer = Checkpointer(tmp_path, attempt=3, keep=9)
    with pytest.warns(CheckpointWarning):
        found = checkpointer.load_latest()
    assert found is not None and found.step == (2 if copies else 1)
    saved = checkpointer.save(3, _state(3))
    assert _key(saved) != _key(damaged)
    assert [m.step for m in list_committed(tmp_path, verify=True)] == [3, 1]
