"""Saves that fail: a full disk, a bucket that refuses. The training goes on, up to a limit, and leaves no files behind.

The disk is a small file system of its own.
"""

import errno
import json
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import buckets
from mizzen.checkpoint import (
    Checkpointer,
    CheckpointError,
    CheckpointSettings,
    CheckpointWarning,
    StaleAttemptError,
    StepStatus,
    list_committed,
    save_failures,
)
from mizzen.objects.files import FileStore
from mizzen.report import Reporter
from tests.objects.faulty import Answer, Proxy, proxy
from tests.sdk.full_disks import FULL, Disk, step, training


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_survived(disk: Disk, background: bool) -> None:
    """Each failed save is a warning and leaves no file; once there is space, the next save is committed."""
    one = training(disk.path / "root", background=background)
    step(one, 1)
    one[0].wait()
    before = disk.files
    disk.fill()
    for number in (2, 3, 4):
        with pytest.warns(CheckpointWarning, match=f"step {number} was not saved: .*{FULL}"):
            step(one, number)
            if background:
                one[0]._saving.join(None)
                one[0]._saving.wait_tolerating()
        assert disk.files == before
    disk.clear()
    step(one, 5)
    one[0].wait()
    assert [m.step for m in list_committed(disk.path / "root", verify=True)] == [5, 1]


@pytest.mark.parametrize(("size_bytes", "left"), [(600_000, [4, 3, 2]), (900_000, [4, 3]), (1_200_000, [1])])
def test_on_a_full_disk_fewer_checkpoints_are_kept(disk: Disk, size_bytes: int, left: list[int]) -> None:
    """Before a save fails for lack of space, it removes the oldest checkpoints, but never the only valid one."""
    checkpointer = Checkpointer(disk.path / "root", keep=3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", CheckpointWarning)
        done = [checkpointer.try_save(number, {"raw": bytes([number]) * size_bytes}) for number in (1, 2, 3, 4)]
    assert [m.step for m in list_committed(disk.path / "root", verify=True)] == left
    assert done == [True, *[left != [1]] * 3]
    removed = [str(warning.message) for warning in said if "no space left; step-" in str(warning.message)]
    assert len(removed) == {600_000: 1, 900_000: 2, 1_200_000: 0}[size_bytes]


def test_a_full_disk_keeps_the_only_valid_checkpoint(disk: Disk) -> None:
    """A newer checkpoint with a flipped bit does not count: the older, valid one stays, and the save fails."""
    checkpointer = Checkpointer(disk.path / "root", keep=3)
    checkpointer.save(1, {"raw": b"1" * 900_000})
    damaged = checkpointer.save(2, {"raw": b"2" * 900_000})
    path = disk.path / "root" / damaged.parts[0].key
    with path.open("r+b") as file:
        file.write(b"x")
    with pytest.warns(CheckpointWarning, match=FULL):
        assert not checkpointer.try_save(3, {"raw": b"3" * 900_000})
    assert [m.step for m in list_committed(disk.path / "root", verify=True)] == [1]


def test_a_step_says_what_it_has_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The status of a step: saved, started in the background, not due, or that the newest save has failed."""
    one = training(tmp_path / "one")
    assert step(one, 1) is StepStatus.SAVED
    assert one[0].step(1) is StepStatus.NOT_DUE, "the step is saved already"
    slow = training(tmp_path / "slow", background=True)
    assert step(slow, 1) is StepStatus.STARTED
    slow[0].wait()
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        _breaking(patch, errno.EIO)
        assert step(training(tmp_path / "other"), 2) is StepStatus.FAILED
        assert step(slow, 2) is StepStatus.STARTED


def test_a_save_that_must_be_durable_waits_for_space(disk: Disk) -> None:
    """`save` warns and tries again until there is space."""
    checkpointer = Checkpointer(disk.path / "root")
    checkpointer.save(1, {"a": bytes(50_000)})
    disk.fill()
    threading.Timer(0.2, disk.clear).start()
    with pytest.warns(CheckpointWarning, match=f"step 2 was not saved: .*{FULL}"):
        assert checkpointer.save(2, {"a": bytes(60_000)}).step == 2
    assert [m.step for m in list_committed(disk.path / "root", verify=True)] == [2, 1]


def test_a_start_on_a_full_disk_claims_later(disk: Disk) -> None:
    """An attempt that starts while the disk is full loads, trains, and claims the root at its first save."""
    Checkpointer(disk.path / "root", attempt=1).save(1, {"model": {"raw": b"1"}, "rng": {}, "progress": {}})
    disk.fill()
    with pytest.warns(CheckpointWarning, match=f"not claimed yet: .*{FULL}"):
        checkpointer = Checkpointer(disk.path / "root", attempt=2, interval_s=0)
    found = checkpointer.load_latest()
    assert found is not None and (found.step, checkpointer.attempt) == (1, None)
    with pytest.warns(CheckpointWarning, match="step 2 was not saved"):
        assert not checkpointer.try_save(2, {"a": 2})
    disk.clear()
    assert checkpointer.try_save(3, {"a": 3})
    assert checkpointer.attempt == 2
    assert [m.step for m in list_committed(disk.path / "root")] == [3, 1]


def test_a_full_local_root_is_left_out(disk: Disk, tmp_path: Path) -> None:
    """If the local root cannot be claimed, checkpoints are saved to the other root only."""
    disk.fill()
    with pytest.warns(CheckpointWarning, match=f"not saved to this root: .*{FULL}"):
        checkpointer = Checkpointer(tmp_path / "far", local=disk.path / "root", attempt=1)
    checkpointer.save(1, {"a": 1})
    found = checkpointer.load_latest()
    assert found is not None and found.step == 1


@pytest.mark.parametrize("background", [False, True])
def test_a_fenced_training_ends_at_once(disk: Disk, background: bool) -> None:
    """A newer attempt's claim ends the training, although its saves could not be written either."""
    one = training(disk.path / "root", background=background)
    step(one, 1)
    one[0].wait()
    Checkpointer(disk.path / "root").claim()
    disk.fill()
    with pytest.raises(StaleAttemptError):
        step(one, 2)
        one[0]._saving.join(None)
        step(one, 3)


def _breaking(patch: pytest.MonkeyPatch, number: int) -> None:
    """Lets all puts fail with an error number."""

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    patch.setattr(FileStore, "put", fail)


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EIO, errno.EROFS])
def test_limits_end_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """At a limit of number or time, a failed save is an error that names the limit. A success starts the count again.

    While there is no checkpoint, less time is allowed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        limited = training(tmp_path / "count", settings=CheckpointSettings(max_failures=2))
        step(limited, 1)
        for base in (2, 5):
            with monkeypatch.context() as patch:
                _breaking(patch, number)
                step(limited, base)
                step(limited, base + 1)
            step(limited, base + 2)
        with monkeypatch.context() as patch:
            _breaking(patch, number)
            step(limited, 8)
            step(limited, 9)
            with pytest.raises(CheckpointError, match=r"step 10 .*; 3 saves .* max_failures is 2"):
                step(limited, 10)

            monkeypatch.setenv("MIZZEN_CHECKPOINT_MAX_FAILING_S", "0")
            timed = training(tmp_path / "count")
            with pytest.raises(CheckpointError, match=r"; a save has failed within 0 s, and the limit is 0 s"):
                step(timed, 11)
            monkeypatch.delenv("MIZZEN_CHECKPOINT_MAX_FAILING_S")

            first = training(tmp_path / "first")
            step(first, 1)
            monkeypatch.setattr(save_failures, "FIRST_SAVE_S", 0.0)
            with pytest.raises(CheckpointError, match=r"2 saves .* the limit while there is no checkpoint is 0 s"):
                step(first, 2)
            with pytest.raises(OSError, match=os.strerror(number)):
                first[0].save(3, {"a": 1})


@pytest.mark.parametrize("background", [False, True])
def test_saves_are_tried_often_within_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """However long the interval is, a failed save is tried again about ten times within `max_failing_s`."""
    now_s = 0.0
    one = training(tmp_path, interval_s=1000, background=background, settings=CheckpointSettings(max_failing_s=100))
    one[0].save(0, {"raw": b""})
    monkeypatch.setattr(one[0].cadence, "_clock", lambda: now_s)
    one[0].cadence.begin(0)
    _breaking(monkeypatch, errno.EIO)
    failed_at: list[int] = []
    for number in range(1, 1101):
        now_s += 1.0
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", CheckpointWarning)
            step(one, number)
            one[0]._saving.join(None)
        failed_at += [number] * len(found)
    assert 8 <= len(failed_at) <= 12


def test_an_impossible_limit_is_refused(tmp_path: Path) -> None:
    """The error names the field and its value."""
    with pytest.raises(ValueError, match="max_failing_s=-1: must be 0 or more seconds"):
        Checkpointer(tmp_path, settings=CheckpointSettings(max_failing_s=-1))
    with pytest.raises(ValueError, match="max_failures=-1: must be 0 or more"):
        Checkpointer(tmp_path, settings=CheckpointSettings(max_failures=-1))


@pytest.fixture
def s3_link(s3_endpoint: buckets.EmulatorEndpoint) -> Iterator[Proxy]:
    """Yields a proxy to the S3 server, without a fault."""
    with proxy(s3_endpoint.url) as found:
        yield found


def test_a_bucket_that_refuses_is_survived(s3_url: str, s3_link: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """While S3 denies writes, each failed save is a warning."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_link.url)
    one = training(s3_url)
    step(one, 1)

    def deny(answer: Answer) -> None:
        if answer.method == "PUT":
            answer.status, answer.body = 403, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"

    s3_link.fault = deny
    for number in (2, 3):
        with pytest.warns(CheckpointWarning, match=f"step {number} was not saved: .*AccessDenied"):
            step(one, number)
    s3_link.fault = lambda _: None
    step(one, 4)
    assert [m.step for m in list_committed(s3_url, verify=True)] == [4, 1]


def test_a_record_without_links_is_whole_or_absent(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without hard links, a record that could not be written completely is removed."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "hard links are not supported")

    monkeypatch.setattr(os, "link", refuse)
    store = FileStore(disk.path / "root")
    with pytest.raises(OSError, match=FULL):
        store.create("log/1.json", bytes(1_200_000))
    assert disk.files == set()


def test_the_report_tells_failed_saves(disk: Disk, tmp_path: Path) -> None:
    """The report names the failed saves until one succeeds. On a full disk, it leaves no temporary files."""
    reporter = Reporter(tmp_path / "report.json")
    reporter.save_failed(3, 5.0, "step 2 was not saved", None)
    told = json.loads((tmp_path / "report.json").read_text())["failing"]
    assert told == {"failures": 3, "since_s": 5.0, "error": "step 2 was not saved", "limit": None}
    reporter.saved(4, 6.0, 100, 0.1)
    assert json.loads((tmp_path / "report.json").read_text())["failing"] is None

    (disk.path / "root").mkdir()
    full = Reporter(disk.path / "root" / "report.json")
    disk.fill()
    for number in range(3):
        full.save_failed(number, 5.0, "full", None)
    assert disk.files == set()
    disk.clear()
    full.flush()
    assert json.loads((disk.path / "root" / "report.json").read_text())["failing"]["failures"] == 2
