"""After a power loss there is a checkpoint at least as new as the last acknowledged one (`rigs.crash.power_loss`)."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mizzen.objects.files import FileStore
from rigs.crash.disk_model import Disk, everything, nothing
from rigs.crash.disk_recording import Recording, recording
from rigs.crash.power_loss import ROOT, LostWork, check, record, sweep
from tests.depth import few


def _recorded(tmp_path: Path, keep: int, kills: list[int]) -> Recording:
    base = tmp_path / "base"
    base.mkdir()
    return record(base, keep, kills)


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sets the platform, so that metadata servers are not probed."""
    monkeypatch.setenv("MIZZEN_PLATFORM", "sigterm")
    yield


@pytest.mark.rotating
@pytest.mark.parametrize(("keep", "kills"), few([(1, []), (2, [4, 30, 60]), (1, [8, 80])], 2))
def test_no_state_of_the_disk_loses_what_was_acknowledged(
    tmp_path: Path, platform: None, keep: int, kills: list[int]
) -> None:
    """No disk state after a power loss during claims, saves, removals or kills loses an acknowledged checkpoint."""
    recorder = _recorded(tmp_path, keep, kills)
    assert {"mkdir", "create", "write", "fsync", "link", "replace", "unlink", "rmdir"} == {
        mutation[0] for mutation in recorder.mutations
    }
    checked = sweep(tmp_path / "state", recorder, keep, random.Random(1), 4, 0.03)
    assert checked > 10


@pytest.mark.rotating
def test_any_choice_of_what_is_not_synced(tmp_path: Path, platform: None) -> None:
    """The checkpoint survives any time of the power loss and any outcome of unsynced changes, chosen by Hypothesis."""
    recorder = _recorded(tmp_path, 1, [9])

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        done = data.draw(st.integers(0, len(recorder.mutations)))
        disk = Disk()
        for mutation in recorder.mutations[:done]:
            disk.do(mutation)
        tree = disk.crash(lambda count: data.draw(st.integers(0, count - 1)))
        acknowledged = max((step for before, step in recorder.acknowledged if before <= done), default=0)
        check(tree, tmp_path / "state", acknowledged, 1)

    holds()


@pytest.mark.parametrize("forgotten", ["file", "folder", "folders above"])
def test_a_forgotten_sync_is_found(
    tmp_path: Path, platform: None, forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If any kind of fsync is omitted, the check finds a disk state that lost an acknowledged checkpoint."""
    recorder = _recorded(tmp_path, 1, [])
    folders = {mutation[2] for mutation in recorder.mutations if mutation[0] == "mkdir"}
    leaves = {m[2] for m in recorder.mutations if m[0] == "mkdir" and m[1] in (f"{ROOT}/log",)}
    wanted = {
        "file": lambda number: number not in folders and number != recorder.base.stat().st_ino,
        "folder": lambda number: number in leaves,
        "folders above": lambda number: number in folders - leaves,
    }[forgotten]
    kept = [m for m in recorder.mutations if not (m[0] == "fsync" and wanted(m[1]))]
    assert len(kept) < len(recorder.mutations)
    end = len(kept)
    broken = Recording(recorder.base, kept, [(end, step) for _, step in recorder.acknowledged])
    disk = Disk()
    for mutation in broken.mutations:
        disk.do(mutation)
    check(disk.crash(everything), tmp_path / "state", 3, 1)
    with pytest.raises(LostWork):
        check(disk.crash(nothing), tmp_path / "state", 3, 1)


def test_folders_of_one_that_was_killed_are_made_durable(tmp_path: Path) -> None:
    """The first put fsyncs all folders up to the root's parent, even existing ones; the next one only its own."""
    base = tmp_path / "base"
    (base / "runs" / "one" / "log").mkdir(parents=True)
    with recording(base) as recorder:
        store = FileStore(base / "runs" / "one")
        store.put("log/1", b"body")
        first = [mutation[1] for mutation in recorder.mutations if mutation[0] == "fsync"]
        store.put("log/2", b"body")
        second = [mutation[1] for mutation in recorder.mutations if mutation[0] == "fsync"][len(first) :]
    log = base / "runs" / "one" / "log"
    assert first[1:] == [folder.stat().st_ino for folder in (log, log.parent, log.parents[1], base)]
    assert second[1:] == [log.stat().st_ino]
