"""Attempts: an older one can never commit after a newer one claimed the root."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mizzen.checkpoint import Checkpointer, CheckpointError, CheckpointWarning, StaleAttemptError, list_committed
from mizzen.checkpoint.log import Log, claim
from mizzen.objects.files import FileStore
from mizzen.objects.store import ObjectInfo

STALE = 7


def _rest(root: Path) -> list[str]:
    """Files that no committed checkpoint needs, but the records."""
    needed = {root / part.key for manifest in list_committed(root) for part in manifest.parts}
    files = (path for path in root.rglob("*") if path.is_file() and path.parent.name != "log")
    return sorted(str(path.relative_to(root)) for path in files if path not in needed)


def test_an_older_attempt_is_refused(tmp_path: Path) -> None:
    """After attempt 2 has claimed the root, attempt 1 can neither save nor claim, and leaves nothing behind."""
    old = Checkpointer(tmp_path, attempt=1)
    old.save(1, {})
    Checkpointer(tmp_path, attempt=2)
    with pytest.raises(StaleAttemptError, match="claimed by attempt 2; attempt 1 may not write here"):
        old.save(2, {})
    with pytest.raises(StaleAttemptError, match="claimed by attempt 2; attempt 1 may not"):
        Checkpointer(tmp_path, attempt=1)
    assert [m.step for m in list_committed(tmp_path)] == [1]
    assert _rest(tmp_path) == []


def test_several_processes_of_an_attempt_may_claim(tmp_path: Path) -> None:
    """A rank's claim of the same attempt changes nothing for the rank that saves."""
    writer = Checkpointer(tmp_path, attempt=3)
    writer.save(1, {"a": 1})
    for _ in range(3):
        found = Checkpointer(tmp_path, attempt=3, rank=1, world_size=2).load_latest()
        assert found is not None and found.step == 1
    writer.save(2, {"a": 2})
    assert [m.step for m in list_committed(tmp_path)] == [2, 1]


def test_whichever_rank_comes_first_shuts_the_zombie_out(tmp_path: Path) -> None:
    """Once any rank of an attempt has loaded, no zombie can change what the other ranks load."""
    zombie = Checkpointer(tmp_path, attempt=1)
    zombie.save(1, {})
    early = Checkpointer(tmp_path, attempt=2, rank=1, world_size=2).load_latest()
    with pytest.raises(StaleAttemptError):
        zombie.save(2, {})
    late = Checkpointer(tmp_path, attempt=2).load_latest()
    assert early is not None and late is not None
    assert early.step == late.step == 1


def test_without_numbers_the_first_to_save_writes(tmp_path: Path) -> None:
    """Outside a scheduler a process takes the number after those that it has seen, at its first save."""
    first, second = Checkpointer(tmp_path), Checkpointer(tmp_path)
    second.save(1, {})
    with pytest.raises(StaleAttemptError, match="another process has claimed it as attempt 1 meanwhile"):
        first.save(1, {})
    assert (first.attempt, second.attempt) == (None, 1)
    # One that goes on from what the other saved has seen it, and takes the root over.
    assert first.load_latest() is not None
    first.save(2, {})
    assert first.attempt == 2
    with pytest.raises(StaleAttemptError, match="claimed by attempt 2; attempt 1 may not write here"):
        second.save(2, {})
    assert Checkpointer(tmp_path, rank=1, world_size=2).attempt is None
    assert Checkpointer(tmp_path).claim() == 3


def test_looking_at_a_run_takes_nothing_from_it(tmp_path: Path) -> None:
    """Another process loads the newest checkpoint, into objects too, and the training's next save is as ever."""
    training = Checkpointer(tmp_path)
    training.save(1, {"rng": {}, "progress": {"step": 1}, "a": {"x": 1}})
    before = sorted(path.name for path in (tmp_path / "log").iterdir())
    notebook = Checkpointer(tmp_path)
    found = notebook.load_latest()
    assert found is not None and found.step == 1
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == before
    training.save(2, {"a": {"x": 2}})


def test_of_two_with_the_same_number_the_last_commits(tmp_path: Path) -> None:
    """The one that claimed first is refused, before and after the other's claim is gone from the log."""
    first = Checkpointer(tmp_path, attempt=3)
    first.save(1, {"a": "first"})
    second = Checkpointer(tmp_path, attempt=3)
    for step in (2, 3, 4):
        with pytest.raises(StaleAttemptError, match="another process has claimed it as attempt 3 too, later"):
            first.save(step, {"a": "first"})
        second.save(step, {"a": "second"})
    found = Checkpointer(tmp_path).load_latest()
    assert found is not None and (found.step, found.state) == (4, {"a": "second"})
    assert [m.step for m in list_committed(tmp_path, verify=True)] == [4, 3]
    assert _rest(tmp_path) == []


def test_a_damaged_claim_is_told_and_takes_its_place(tmp_path: Path) -> None:
    """A damaged record keeps its number; the next claim says so and comes after it."""
    Checkpointer(tmp_path, attempt=4).save(1, {})
    Checkpointer(tmp_path, attempt=5)
    (tmp_path / "log" / "0000000003.json").write_bytes(b"\x00" * 20)
    with pytest.warns(CheckpointWarning, match="record 3 of the log is damaged"):
        Checkpointer(tmp_path, attempt=6).save(2, {})
    assert [m.attempt for m in list_committed(tmp_path)] == [6, 4]
    with pytest.raises(StaleAttemptError, match="claimed by attempt 6"):
        Checkpointer(tmp_path, attempt=5)


def test_what_is_no_record_in_the_way_is_told(tmp_path: Path) -> None:
    """Something in the log's next place that cannot be read as an object is an error, not a wait without end."""
    checkpointer = Checkpointer(tmp_path, attempt=1)
    (tmp_path / "log" / "0000000002.json").symlink_to("/nowhere")
    with pytest.raises(CheckpointError, match=r"0000000002\.json cannot be created"):
        checkpointer.save(1, {})


def test_a_listing_that_shows_too_little_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that is in the way and not listed yet, as its folder is changing, is found a moment later."""
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


def test_a_claim_removes_what_older_attempts_left_and_only_that(tmp_path: Path) -> None:
    """Parts of older attempts that no checkpoint needs go, and so do their shards; those of this attempt stay."""
    Checkpointer(tmp_path, attempt=2).save(1, {"a": b"kept"})
    for attempt in (1, 2, 3):
        for key in ("parts/a{:04d}/step-1.r0000.00aa/part-x.bin", "shards/a{:04d}/step-1.s1/r0001.json"):
            path = tmp_path / key.format(attempt)
            path.parent.mkdir(parents=True)
            path.write_bytes(b"x")
    Checkpointer(tmp_path, attempt=2)
    assert len(_rest(tmp_path)) == 6
    Checkpointer(tmp_path, attempt=3)
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


def test_a_zombie_frozen_anywhere_in_a_save_cannot_commit_later(tmp_path: Path, fork: Callable[..., Any]) -> None:
    """Frozen before any file operation of its save and thawed after attempt 2 saved, attempt 1 commits nothing.

    Attempt 2 never waits for it. What it had committed before it froze is attempt 2's to load; else it is refused.
    """
    refused = before = ended = 0
    for event in range(1, 500):
        root = tmp_path / str(event)
        Checkpointer(root, attempt=1).save(1, {"who": "first"})
        child = fork(_zombie(root), event, signal.SIGSTOP)
        if not child.wait_stopped():
            assert child.end() == 0 and child.said() == b"committed"
            # Parts are put at the same time: how many operations a save takes differs a little.
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


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_many_writers_have_one_order(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    """Of many attempts that claim and save at once, what the log says is in the order of the attempts' claims.

    Whoever is acknowledged committed before any newer attempt claimed; nobody else's record is there.
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
    # A save that was refused because it came too late may be there, but nobody was told of it.
    saves = [m.id.save for m in reversed(found) if (m.attempt, m.step) in acknowledged]
    assert saves == sorted(set(saves)), "ordered by attempt they are in the order in which they were committed"
