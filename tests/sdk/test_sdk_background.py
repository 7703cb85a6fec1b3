"""Background saves, and checkpoint roots in two tiers: a local one and a remote one."""

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from mizzen.checkpoint import Checkpointer, CheckpointError, CheckpointWarning, StaleAttemptError, list_committed
from tests.sdk.scripts import passes


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Returns an event; every fsync blocks until it is set."""
    go_on = threading.Event()
    real = os.fsync

    def sync(descriptor: int) -> None:
        assert go_on.wait(30)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    return go_on


def test_training_goes_on_while_it_is_written(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A background save stores the state at the time of the call, although the training changes it before the write."""
    checkpointer = Checkpointer(tmp_path)
    weights, small = np.arange(1_000_000.0), np.zeros(3)
    checkpointer.save(1, {"w": weights})
    held = request.getfixturevalue("held")
    saving = checkpointer.save_async(2, {"w": weights, "s": small, "raw": b"abc"})
    assert not saving.done and [m.step for m in list_committed(tmp_path)] == [1]
    with pytest.raises(TimeoutError, match="step 2 is still being written"):
        saving.wait(0.01)
    weights += 1
    small += 1
    held.set()
    manifest = saving.wait()
    assert (manifest.step, saving.done, saving.error) == (2, True, None)
    found = checkpointer.load_latest()
    assert found is not None
    assert found.state["w"].tolist() == list(range(1_000_000))
    assert (found.state["s"].tolist(), found.state["raw"]) == ([0, 0, 0], b"abc")


def test_a_next_save_waits_for_the_one_before(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """At most one save is written at a time: a second save waits for the first, and all of them are committed."""
    checkpointer = Checkpointer(tmp_path, keep=5)
    checkpointer.claim()
    held = request.getfixturevalue("held")
    first = checkpointer.save_async(1, {"w": np.full(10, 1)})
    threading.Timer(0.05, held.set).start()
    second = checkpointer.save_async(2, {"w": np.full(10, 2)})
    assert first.done
    checkpointer.save(3, {"w": np.full(10, 3)})
    assert second.done
    assert [m.step for m in list_committed(tmp_path, verify=True)] == [3, 2, 1]


def test_a_save_that_fails_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`wait` raises the error; without `wait` the next save warns. Earlier checkpoints are unchanged."""
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"a": 1})

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(CheckpointError, match=r"step 2 was not saved: .*No space left"):
            checkpointer.save_async(2, {"a": 2}).wait()
        checkpointer.save_async(3, {"a": 3}).join()
    with pytest.warns(CheckpointWarning, match="step 3 was not saved: .*No space left"):
        checkpointer.save(4, {"a": 4})
    assert [m.step for m in list_committed(tmp_path, verify=True)] == [4, 1]


def test_a_zombie_that_saves_in_the_background_is_stopped(tmp_path: Path) -> None:
    """After a newer attempt's claim, `wait` or the next call of the old attempt raises StaleAttemptError."""
    for stop in (lambda c: c.wait(), lambda c: c.save(3, {"a": 1}), lambda c: c.save_async(3, {}), lambda c: c.step(3)):
        zombie = Checkpointer(tmp_path)
        zombie.claim()
        Checkpointer(tmp_path).claim()
        saving = zombie.save_async(2, {"a": 2})
        saving.join()
        with pytest.raises(StaleAttemptError):
            stop(zombie)
    assert list_committed(tmp_path) == []


@pytest.mark.parametrize("kind", ["file", "s3", "gcs"])
def test_the_process_ends_after_its_save(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    """A script that ends during a background save commits it first, although threads cannot be started at that time."""
    root = str(tmp_path) if kind == "file" else request.getfixturevalue(f"{kind}_url")
    told = {name: text for name, text in os.environ.items() if name.startswith(("AWS_", "STORAGE_"))}
    passes(
        f"""
import mizzen
checkpointer = mizzen.Checkpointer({root!r}, attempt=1)
real = checkpointer._roots.writers[0].write
def write(*given):
    threading.main_thread().join()
    return real(*given)
checkpointer._roots.writers[0].write = write
checkpointer.save_async(7, {{"raw": bytes(20_000_000), "more": [1, 2]}})
""",
        **told,
    )
    assert [m.step for m in list_committed(root, verify=True)] == [7]


def test_two_tiers(tmp_path: Path, s3_url: str) -> None:
    """Checkpoints are saved to both roots. The newest of both is loaded, from the local root if it has a copy."""
    local = tmp_path / "local"
    checkpointer = Checkpointer(s3_url, local=local, keep=2)
    for step in (1, 2, 3):
        checkpointer.save_async(step, {"w": np.full(1000, step)}).wait()
    near, far = list_committed(local, verify=True), list_committed(s3_url, verify=True)
    assert [m.id for m in near] == [m.id for m in far] and [m.step for m in far] == [3, 2]

    # The remote root lacks the newest checkpoint, as after a kill before the upload: load and claim copy it there.
    Checkpointer(local, attempt=checkpointer.attempt).save(4, {"w": np.full(1000, 4)})
    after = Checkpointer(s3_url, local=local)
    found = after.load_latest()
    assert found is not None and found.step == 4
    after.claim()
    assert [m.step for m in list_committed(s3_url, verify=True)] == [4, 3]
    again = Checkpointer(s3_url, local=local)
    assert again.load_latest() is not None
    again.claim()
    assert [m.step for m in list_committed(s3_url, verify=True)] == [4, 3]

    # The attempt runs on another machine, whose local root is empty.
    shutil.rmtree(local)
    elsewhere = Checkpointer(s3_url, local=local)
    found = elsewhere.load_latest()
    assert found is not None and found.step == 4
    elsewhere.save(5, {"w": np.full(1000, 5)})
    assert [m.step for m in list_committed(local)] == [5]
    assert [m.step for m in list_committed(s3_url)] == [5, 4]

    # Back on the first machine: the local checkpoint has a later step, but is of an older attempt.
    stale = tmp_path / "stale"
    Checkpointer(stale, attempt=1).save(9, {"w": np.full(1000, 9)})
    back = Checkpointer(s3_url, local=stale)
    found = back.load_latest()
    assert found is not None and found.step == 5


def test_a_damaged_local_copy_falls_back_to_the_far_one(tmp_path: Path) -> None:
    """A part whose local copy is damaged is read from the remote root."""
    near, far = tmp_path / "near", tmp_path / "far"
    checkpointer = Checkpointer(far, local=near)
    for step in (1, 2):
        checkpointer.save(step, {"w": np.full(1000, step)})
    (near / list_committed(near)[0].parts[0].key).write_bytes(b"?")
    with pytest.warns(CheckpointWarning, match="near/: .* does not have .*; read from file:.*/far/parts/"):
        found = Checkpointer(far, local=near).load_latest()
    assert found is not None and found.step == 2


def test_a_local_root_that_is_full_costs_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a save to the local root fails, the checkpoint is committed in the remote root, with a warning."""
    near, far = tmp_path / "near", tmp_path / "far"
    checkpointer = Checkpointer(far, local=near)
    checkpointer.claim()
    shutil.rmtree(near)
    near.write_text("no folder")
    with pytest.warns(CheckpointWarning, match="near: step 1 was not saved to this root"):
        checkpointer.save(1, {"a": 1})
    assert [m.step for m in list_committed(far, verify=True)] == [1]


def test_a_checkpoint_that_is_brought_up_lifts_no_fence(tmp_path: Path) -> None:
    """An older attempt cannot save to the remote root after a newer one has copied its checkpoint there."""
    near, far = tmp_path / "near", tmp_path / "far"
    zombie = Checkpointer(far, keep=1)
    zombie.save(1, {"a": 1})
    Checkpointer(near, attempt=1).save(2, {"a": 2})
    newer = Checkpointer(far, local=near, keep=1)
    found = newer.load_latest()
    assert found is not None and found.step == 2
    newer.claim()
    assert [m.step for m in list_committed(far)] == [2]
    with pytest.raises(StaleAttemptError):
        zombie.save(3, {"a": 3})
    assert Checkpointer(far).claim() == 3
