"""A writer that was frozen during a save and resumes after a newer attempt: it is refused and does no damage."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mizzen.checkpoint import Checkpointer, StaleAttemptError, list_committed
from mizzen.checkpoint.place import Gang, Retention
from mizzen.checkpoint.roots import open_root
from mizzen.checkpoint.writer import Encoded, Writer, open_writer
from mizzen.objects.files import FileStore


class Frozen(FileStore):
    """A file store that calls `before` and `after` once, just before and just after a record is created."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.before: Callable[[], None] | None = None
        self.after: Callable[[], None] | None = None

    def create(self, key: str, body: bytes) -> bool:
        """See `ObjectStore.create`."""
        before, self.before = self.before, None
        if before is not None:
            before()
        made = super().create(key, body)
        after, self.after = self.after, None
        if after is not None:
            after()
        return made


def _encoded(step: int) -> Encoded:
    return {"model": ("bytes", [b"model %d" % step]), "tokens": ("bytes", [b"always the same"])}


def _writer(store: FileStore, keep: int = 2, **gang: int) -> Writer:
    return open_writer(store, None, Gang(**gang), Retention(keep))


def test_a_commit_before_the_newer_claim_stays(tmp_path: Path) -> None:
    """If a writer freezes after it created its record, the checkpoint is committed and the next attempt keeps it."""
    store = Frozen(tmp_path)
    old = _writer(store)
    old.write(1, _encoded(1))

    def succeed() -> None:
        new = _writer(FileStore(tmp_path))
        assert [m.step for m in list_committed(tmp_path, verify=True)] == [2, 1]
        new.write(3, _encoded(3))

    store.after = succeed
    with pytest.raises(StaleAttemptError):
        old.write(2, _encoded(2))
    assert [m.step for m in list_committed(tmp_path, verify=True)] == [3, 2]


def test_a_record_that_comes_too_late_is_withdrawn(tmp_path: Path) -> None:
    """A writer that was frozen before its commit and resumes after newer commits removes its late record again."""
    store = Frozen(tmp_path)
    old = _writer(store)
    old.write(1, _encoded(1))

    def succeed() -> None:
        new = _writer(FileStore(tmp_path))
        new.write(3, _encoded(3))
        new.write(4, _encoded(4))

    store.before = succeed
    with pytest.raises(StaleAttemptError):
        old.write(2, _encoded(2))
    assert [m.step for m in list_committed(tmp_path, verify=True)] == [4, 3]
    assert len(list((tmp_path / "log").iterdir())) == 2, "the log must have exactly two records"
    next_one = Checkpointer(tmp_path)
    assert next_one.load_latest() is not None
    next_one.claim()
    left = {key for m in list_committed(tmp_path, verify=True) for key in m.keys}
    assert {info.key for info in FileStore(tmp_path).list("parts/")} == left, "the next attempt removes unused parts"


@pytest.mark.parametrize("kind", ["file", "s3", "gcs"])
@pytest.mark.parametrize("attempt", [1, 2])
def test_parts_that_a_newer_writer_has_taken_over_stay(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str, attempt: int
) -> None:
    """A writer freezes after its commit. Newer saves reuse a part of it, and retention removes the checkpoint.

    The newer writer is a newer attempt, or another process of the same attempt.
    """
    url = str(tmp_path) if kind == "file" else request.getfixturevalue(f"{kind}_url")
    store = open_root(url)
    old = open_writer(store, 1, Gang(), Retention(2))
    create = store.create

    def frozen(key: str, body: bytes) -> bool:
        made = create(key, body)
        new = Checkpointer(url, attempt=attempt, keep=2)
        found = new.load_latest()
        assert found is not None and found.step == 1
        for step in (2, 3):
            saved = new.save(step, {"model": b"model %d" % step, "tokens": b"always the same"})
            assert any(part.key.startswith("parts/a0001/step-0000000001.") for part in saved.parts)
        return made

    monkeypatch.setattr(store, "create", frozen)
    with pytest.raises(StaleAttemptError):
        old.write(1, _encoded(1))
    assert [m.step for m in list_committed(url, verify=True)] == [3, 2]
    found = Checkpointer(url, attempt=attempt + 1).load_latest()
    assert found is not None and found.step == 3


def test_a_rank_that_waits_leaves_what_rank_0_has_committed(tmp_path: Path) -> None:
    """If a newer attempt claims the root after rank 0's commit, the waiting rank 1 fails but keeps its parts."""
    first = open_writer(FileStore(tmp_path), 1, Gang(0, 2), Retention())

    class Waits(FileStore):
        def put(self, key: str, body: object) -> None:
            super().put(key, body)  # type: ignore[arg-type]
            if key.startswith("shards/"):
                first.write(1, _encoded(1), ["model"])
                open_writer(FileStore(tmp_path), 2, Gang(0, 2), Retention())

    second = open_writer(Waits(tmp_path), 1, Gang(1, 2), Retention())
    with pytest.raises(StaleAttemptError):
        second.write(1, _encoded(1), ["model"])
    assert [m.step for m in list_committed(tmp_path, verify=True)] == [1]


def test_two_roots_count_their_attempts_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Extra claims of a local root do not hide a newer checkpoint that another machine saved to the remote root."""
    monkeypatch.setenv("MIZZEN_PLATFORM", "sigterm")
    far, here, there = (tmp_path / name for name in ("far", "here", "there"))
    for _ in range(2):
        Checkpointer(here)
    Checkpointer(far, local=here).save(1, {"x": 1})
    Checkpointer(far, local=there).save(2, {"x": 2})
    found = Checkpointer(far, local=here).load_latest()
    assert found is not None and found.step == 2


def test_no_record_names_a_part_that_is_removed(tmp_path: Path) -> None:
    """A part is deleted only after all records that name it, also if several checkpoints are removed at once."""
    first = _writer(FileStore(tmp_path), keep=3)
    for step in (1, 2, 3):
        first.write(step, _encoded(step))
    removed = []

    class Looks(FileStore):
        def delete(self, key: str) -> None:
            super().delete(key)
            if key.startswith("parts/"):
                removed.append(key)
                records = [path.read_text() for path in (tmp_path / "log").iterdir()]
                assert not any(f'"{key}"' in record for record in records), key

    _writer(Looks(tmp_path), keep=1).write(4, _encoded(4))
    assert len([key for key in removed if "/part-" in key]) == 4
    assert [m.step for m in list_committed(tmp_path, verify=True)] == [4]
