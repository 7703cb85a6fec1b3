"""Fencing of attempts: after a newer attempt claimed the root, an older attempt cannot commit."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mizzen.checkpoint import (
    Checkpointer,
    CheckpointError,
    CheckpointSettings,
    CheckpointWarning,
    StaleAttemptError,
    list_committed,
)
from mizzen.checkpoint.log import Log, claim
from mizzen.objects.files import FileStore
from mizzen.objects.store import ObjectInfo
from tests.depth import examples

STALE = 7


def _rest(root: Path) -> list[str]:
    """Returns the files that no committed checkpoint needs, except the records of the log."""
    needed = {root / key for manifest in list_committed(root) for key in manifest.keys}
    files = (path for path in root.rglob("*") if path.is_file() and path.parent.name != "log")
    return sorted(str(path.relative_to(root)) for path in files if path not in needed)


def test_an_older_attempt_is_refused(tmp_path: Path) -> None:
    """After attempt 2 has claimed the root, a save or claim of attempt 1 is an error and leaves no files."""
    old = Checkpointer(tmp_path, attempt=1)
    old.save(1, {"a": 1})
    Checkpointer(tmp_path, attempt=2)
    with pytest.raises(StaleAttemptError, match="claimed by attempt 2; attempt 1 may not write there"):
        old.save(2, {"a": 1})
    with pytest.raises(StaleAttemptError, match="claimed by attempt 2; attempt 1 may not"):
        Checkpointer(tmp_path, attempt=1)
    assert [m.step for m in list_committed(tmp_path)] == [1]
    assert _rest(tmp_path) == []


def test_several_processes_of_an_attempt_may_claim(tmp_path: Path) -> None:
    """Claims of the same attempt by other ranks do not fence the rank that saves."""
    writer = Checkpointer(tmp_path, attempt=3)
    writer.save(1, {"a": 1})
    for _ in range(3):
        found = Checkpointer(tmp_path, attempt=3, settings=CheckpointSettings(rank=1, world_size=2)).load_latest()
        assert found is not None and found.step == 1
    writer.save(2, {"a": 2})
    assert [m.step for m in list_committed(tmp_path)] == [2, 1]


def test_whichever_rank_comes_first_shuts_the_zombie_out(tmp_path: Path) -> None:
    """After any rank of a new attempt has loaded, an older attempt cannot change what the other ranks load."""
    zombie = Checkpointer(tmp_path, attempt=1)
    zombie.save(1, {"a": 1})
    early = Checkpointer(tmp_path, attempt=2, settings=CheckpointSettings(rank=1, world_size=2)).load_latest()
    with pytest.raises(StaleAttemptError):
        zombie.save(2, {"a": 1})
    late = Checkpointer(tmp_path, attempt=2).load_latest()
    assert early is not None and late is not None
    assert early.step == late.step == 1


def test_without_numbers_the_first_to_save_writes(tmp_path: Path) -> None:
    """Without a given attempt, the first save of a process claims the next number after those it has read."""
    first, second = Checkpointer(tmp_path), Checkpointer(tmp_path)
    second.save(1, {"a": 1})
    with pytest.raises(StaleAttemptError, match="another process has already claimed it as attempt 1"):
        first.save(1, {"a": 1})
    assert (first.attempt, second.attempt) == (None, 1)
    # After it has loaded the other process's checkpoint, the first process can claim the root.
    assert first.load_latest() is not None
    first.save(2, {"a": 1})
    assert first.attempt == 2
    with pytest.raises(StaleAttemptError, match="claimed by attempt 2; attempt 1 may not write there"):
        second.save(2, {"a": 1})
    assert Checkpointer(tmp_path, settings=CheckpointSettings(rank=1, world_size=2)).attempt is None
    assert Checkpointer(tmp_path).claim() == 3


def test_looking_at_a_run_takes_nothing_from_it(tmp_path: Path) -> None:
    """A load by another process makes no claim, so the training's next save succeeds."""
    training = Checkpointer(tmp_path)
    training.save(1, {"rng": {}, "progress": {"step": 1}, "a": {"x": 1}})
    before = sorted(path.name for path in (tmp_path / "log").iterdir())
    notebook = Checkpointer(tmp_path)
    found = notebook.load_latest()
    assert found is not None and found.step == 1
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == before
    training.save(2, {"a": {"x": 2}})


def test_of_two_with_the_same_number_the_last_commits(tmp_path: Path) -> None:
    """Of two processes with the same attempt number, only the last to claim can save, even if its claim is pruned."""
    first = Checkpointer(tmp_path, attempt=3)
    first.save(1, {"a": "first"})
    second = Checkpointer(tmp_path, attempt=3)
    for step in (2, 3, 4):
        with pytest.raises(StaleAttemptError, match="another process has since claimed it as attempt 3 too"):
            first.save(step, {"a": "first"})
        second.save(step, {"a": "second"})
    found = Checkpointer(tmp_path).load_latest()
    assert found is not None and (found.step, found.state) == (4, {"a": "second"})
    assert [m.step for m in list_committed(tmp_path, verify=True)] == [4, 3]
    assert _rest(tmp_path) == []


def test_a_damaged_claim_is_told_and_takes_its_place(tmp_path: Path) -> None:
    """After a damaged record, the next claim warns and takes the next record number."""
    Checkpointer(tmp_path, attempt=4).save(1, {"a": 1})
    Checkpointer(tmp_path, attempt=5)
    (tmp_path / "log" / "0000000003.json").write_bytes(b"\x00" * 20)
    with pytest.warns(CheckpointWarning, match="record 3 of the log is damaged"):
        Checkpointer(tmp_path, attempt=6).save(2, {"a": 1})
    assert [m.attempt for m in list_committed(tmp_path)] == [6, 4]
    with pytest.raises(StaleAttemptError, match="claimed by attempt 6"):
        Checkpointer(tmp_path, attempt=5)


def test_what_is_no_record_in_the_way_is_told(tmp_path: Path) -> None:
    """If the next record's path exists but is not readable as an object, the save is an error and does not hang."""
    checkpointer = Checkpointer(tmp_path, attempt=1)
    (tmp_path / "log" / "0000000002.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"0000000002\.json cannot be created"):
        checkpointer.save(1, {"a": 1})


def test_a_listing_that_shows_too_little_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a record exists but a listing during a change of the folder misses it, the claim lists again."""
    Checkpointer(tmp_path, attempt=1)
    listed, calls = FileStore.list, 0

    def late(store: FileStore, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        nonlocal calls
        calls += 1
        return iter(()) if calls <= 2 else listed(store, prefix, after=after)

    monkeypatch.setattr(FileStore, "list", late)
    claimed = claim(Log(FileStore(tmp_path)), 2, "other")
    assert (claimed.attempt, claimed.first) == (2, True)
    assert calls > 2


def test_an_attempt_removes_what_older_attempts_left_and_only_that(tmp_path: Path) -> None:
    """A process that has claimed and loaded deletes unneeded parts and shards of older attempts, but not of its own."""
    Checkpointer(tmp_path, attempt=2).save(1, {"a": b"kept"})
    for attempt in (1, 2, 3):
        for key in ("parts/a{:04d}/step-1.r0000.00aa/part-x.bin", "shards/a{:04d}/step-1.s1/r0001.json"):
            path = tmp_path / key.format(attempt)
            path.parent.mkdir(parents=True)
            path.write_bytes(b"x")
    Checkpointer(tmp_path, attempt=2).load_latest()
    assert len(_rest(tmp_path)) == 6
    third = Checkpointer(tmp_path, attempt=3)
    assert len(_rest(tmp_path)) == 6, "it has loaded nothing yet"
    assert third.load_latest() is not None
    assert _rest(tmp_path) == ["parts/a0003/step-1.r0000.00aa/part-x.bin", "shards/a0003/step-1.s1/r0001.json"]
    assert [m.step for m in list_committed(tmp_path, verify=True)] == [1]


def _zombie(root: Path) -> Callable[[Callable[[bytes], None]], None]:
    checkpointer = Checkpointer(root, attempt=1, keep=1)

    def work(tell: Callable[[bytes], None]) -> None:
        try:
            checkpointer.save(2, {"who": "zombie", "raw": b"z" * 5000})
        except StaleAttemptError:
            raise SystemExit(STALE) from None
        tell(b"committed")

    return work


@pytest.mark.rotating
def test_a_zombie_frozen_anywhere_in_a_save_cannot_commit_later(tmp_path: Path, fork: Callable[..., Any]) -> None:
    """If attempt 1 is frozen before any file operation of a save and thawed after attempt 2 saved, it commits nothing.

    Attempt 2 does not wait. It loads the checkpoint if attempt 1 committed it before the freeze; otherwise attempt 1's
    save raises StaleAttemptError. By default every fifth operation is tried.
    """
    refused = before = ended = 0
    for event in range(1, 500, 1 if examples(100) >= 100 else 5):
        root = tmp_path / str(event)
        Checkpointer(root, attempt=1).save(1, {"who": "first"})
        child = fork(_zombie(root), event, signal.SIGSTOP)
        if not child.wait_stopped():
            assert child.end() == 0 and child.said() == b"committed"
            # Parts are written concurrently, so the number of file operations of a save varies slightly.
            ended += 1
            if ended == 5:
                break
            continue
        newer = Checkpointer(root, attempt=2)
        found = newer.load_latest()
        assert found is not None
        newer.save(3, {"who": "second"})
        os.kill(child.pid, signal.SIGCONT)
        code, said = child.end(), child.said()
        assert (code, said) in ((STALE, b""), (0, b"committed")), f"event {event}"
        assert found.step == 2 or code == STALE, f"event {event}"
        refused += code == STALE
        before += found.step == 2
        newest = list_committed(root, verify=True)[0]
        assert (newest.attempt, newest.step) == (2, 3), f"event {event}"
        last = Checkpointer(root, attempt=3).load_latest()
        assert last is not None and last.state == {"who": "second"}
        assert _rest(root) == [], f"event {event}"
    assert refused > 3 and before > 3


@pytest.mark.rotating
@pytest.mark.parametrize("kind", ["file", "s3"])
def test_many_writers_have_one_order(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    """If many attempts claim and save concurrently, the log orders their checkpoints by attempt.

    An acknowledged save was committed before any newer attempt claimed the root.
    """
    root = str(tmp_path) if kind == "file" else request.getfixturevalue("s3_url")
    acknowledged: list[tuple[int, int]] = []
    ready = threading.Barrier(4)

    def train(first: int) -> None:
        ready.wait()
        for attempt in range(first, 13, 4):
            try:
                checkpointer = Checkpointer(root, attempt=attempt, keep=100)
                for step in (1, 2):
                    checkpointer.save(step, {"attempt": attempt})
                    acknowledged.append((attempt, step))
            except StaleAttemptError:
                continue

    threads = [threading.Thread(target=train, args=(first,)) for first in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = list_committed(root, verify=True)
    assert found[0].attempt == 12
    assert {(m.attempt, m.step) for m in found} >= set(acknowledged)
    # A save that was refused as too late may have a record, but it was not acknowledged.
    saves = [m.id.save for m in reversed(found) if (m.attempt, m.step) in acknowledged]
    assert saves == sorted(set(saves)), "the order by attempt is not the order of the commits"
