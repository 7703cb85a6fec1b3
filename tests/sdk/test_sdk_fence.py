"""Attempts: an older one can never commit after a newer one claimed the folder."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mizzen.checkpoint.writing as writing
from mizzen.checkpoint import Checkpointer, CheckpointError, CheckpointWarning, StaleAttemptError, list_committed

STALE = 7


def _hidden(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.startswith((".draft", ".trash")))


def test_an_older_attempt_is_refused(tmp_path: Path) -> None:
    """After attempt 2 has claimed the folder, attempt 1 can neither save nor claim, and leaves nothing behind."""
    old = Checkpointer(tmp_path, attempt=1)
    old.save(1, {})
    Checkpointer(tmp_path, attempt=2)
    with pytest.raises(StaleAttemptError, match="claimed by attempt 2; attempt 1 may not write here"):
        old.save(2, {})
    with pytest.raises(StaleAttemptError, match="claimed by attempt 2; attempt 1 may not"):
        Checkpointer(tmp_path, attempt=1)
    assert [m.step for m in list_committed(tmp_path)] == [1]
    assert _hidden(tmp_path) == []


def test_several_processes_of_an_attempt_may_claim(tmp_path: Path) -> None:
    """A rank's claim of the same attempt changes nothing for the rank that saves."""
    writer = Checkpointer(tmp_path, attempt=3)
    writer.save(1, {"a": 1})
    for _ in range(3):
        found = Checkpointer(tmp_path, attempt=3, writer=False).load_latest()
        assert found is not None and found.step == 1
    writer.save(2, {"a": 2})
    assert [m.step for m in list_committed(tmp_path)] == [2, 1]


def test_whichever_rank_comes_first_shuts_the_zombie_out(tmp_path: Path) -> None:
    """Once any rank of an attempt has loaded, no zombie can change what the other ranks load."""
    zombie = Checkpointer(tmp_path, attempt=1)
    zombie.save(1, {})
    early = Checkpointer(tmp_path, attempt=2, writer=False).load_latest()
    with pytest.raises(StaleAttemptError):
        zombie.save(2, {})
    late = Checkpointer(tmp_path, attempt=2).load_latest()
    assert early is not None and late is not None
    assert early.step == late.step == 1


def test_without_numbers_the_last_to_start_writes(tmp_path: Path) -> None:
    """Outside a scheduler each writer takes the next number, also after a copy that brought no fence along."""
    first, second = Checkpointer(tmp_path), Checkpointer(tmp_path)
    assert (first.attempt, second.attempt) == (1, 2)
    second.save(1, {})
    with pytest.raises(StaleAttemptError):
        first.save(1, {})
    assert Checkpointer(tmp_path, writer=False).attempt is None
    (tmp_path / "fence").unlink()
    assert Checkpointer(tmp_path).attempt == 3


def test_a_damaged_fence_is_replaced_at_the_next_claim(tmp_path: Path) -> None:
    """A damaged fence stops the writer, and the next attempt replaces it with a warning."""
    writer = Checkpointer(tmp_path, attempt=4)
    writer.save(1, {})
    (tmp_path / "fence").write_bytes(b"\x00" * 20)
    with pytest.raises(StaleAttemptError, match="missing or damaged"):
        writer.save(2, {})
    with pytest.warns(CheckpointWarning, match="damaged"), pytest.raises(StaleAttemptError, match="by attempt 4"):
        Checkpointer(tmp_path, attempt=3)
    with pytest.warns(CheckpointWarning, match="damaged"):
        Checkpointer(tmp_path, attempt=5).save(2, {})
    assert [m.attempt for m in list_committed(tmp_path)] == [5, 4]


def test_a_claim_removes_what_the_dead_left_and_only_that(tmp_path: Path) -> None:
    """Drafts of older attempts and of dead writers of this one go; that of a living writer of this one stays."""
    Checkpointer(tmp_path, attempt=2)
    for name in (".draft-a0001-00aa", ".draft-a0002-00bb", ".trash-00cc"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part-x.bin").write_bytes(b"x")
    with writing._draft(tmp_path, 2) as alive:
        Checkpointer(tmp_path, attempt=2)
        assert _hidden(tmp_path) == [alive.name]
        Checkpointer(tmp_path, attempt=3)
        assert _hidden(tmp_path) == []


def _zombie(root: Path) -> Callable[[Callable[[bytes], None]], None]:
    checkpointer = Checkpointer(root, attempt=1, keep=1)

    def work(tell: Callable[[bytes], None]) -> None:
        try:
            checkpointer.save(2, {"who": "zombie", "raw": b"z" * 5000})
        except StaleAttemptError:
            raise SystemExit(STALE) from None
        tell(b"committed")

    return work


@pytest.mark.parametrize("cleans", [True, False])
def test_a_zombie_frozen_anywhere_in_a_save_cannot_commit_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork: Callable[..., Any], cleans: bool
) -> None:
    """Frozen before any file operation of its save and thawed after attempt 2 saved, attempt 1 commits nothing.

    Only where it froze holding the lock does attempt 2 wait for it, and then starts from what it committed. It holds
    as well where the claim came no further than its fence, and left the zombie's draft where it was.
    """
    monkeypatch.setattr(writing, "LOCK_TIMEOUT_S", 0.03)
    abandoned = writing._abandoned
    refused = waited = 0
    for event in range(1, 500):
        root = tmp_path / str(event)
        Checkpointer(root, attempt=1).save(1, {"who": "first"})
        child = fork(_zombie(root), event, signal.SIGSTOP)
        monkeypatch.setattr(writing, "_abandoned", abandoned if cleans else lambda path, attempt: False)
        if not child.wait_stopped():
            assert child.end() == 0 and child.said() == b"committed"
            break
        try:
            Checkpointer(root, attempt=2).save(3, {"who": "second"})
        except CheckpointError:
            os.kill(child.pid, signal.SIGCONT)
            code = child.end()
            newer = Checkpointer(root, attempt=2)
            committed = child.said() == b"committed"
            found = newer.load_latest()
            assert found is not None and found.step == (2 if committed else 1), f"event {event}"
            # The lock may also be that of its draft's start: a claim in between refuses it as well.
            assert code == (0 if committed else STALE)
            newer.save(3, {"who": "second"})
            waited += 1
        else:
            os.kill(child.pid, signal.SIGCONT)
            code, said = child.end(), child.said()
            assert (code, said) in ((STALE, b""), (0, b"committed")), f"event {event}"
            refused += code == STALE
        newest = list_committed(root, verify=True)[0]
        assert (newest.attempt, newest.step) == (2, 3), f"event {event}"
        assert all(m.attempt == 2 or m.step <= 2 for m in list_committed(root))
        monkeypatch.setattr(writing, "_abandoned", abandoned)
        Checkpointer(root, attempt=2)
        assert _hidden(root) == [], f"event {event}"
    assert refused > 5 and waited > 5
