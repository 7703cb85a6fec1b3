"""The interval that an agent writes for a task, read by the SDK that the task uses."""

import os
import stat
import time
from math import inf
from pathlib import Path

import pytest

from agent.intervals import write_interval
from agent.tasks import RunFolder
from mizzen.cadence.interval_file import IntervalFile, SiteInterval


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = tmp_path / "main.0"
    folder.mkdir(mode=0o711)
    return RunFolder(folder, "wl-1", 1, "main", 0)


def read(run: RunFolder) -> SiteInterval | None:
    return IntervalFile(run.interval_file).current()


def test_the_sdk_reads_what_the_agent_writes(run: RunFolder) -> None:
    assert read(run) is None
    expires_at_s = time.time() + 600
    write_interval(run, SiteInterval(412.5, expires_at_s, 0.8, 30.0, 11.25))
    assert read(run) == SiteInterval(412.5, expires_at_s, 0.8, 30.0, 11.25)
    write_interval(run, SiteInterval(90.0, expires_at_s, least_s=45.0))
    assert read(run) == SiteInterval(90.0, expires_at_s, least_s=45.0)


def test_other_users_can_read_the_file_but_not_write_it(run: RunFolder) -> None:
    """Also under a strict umask of the agent."""
    before = os.umask(0o077)
    try:
        write_interval(run, SiteInterval(90.0, time.time() + 600))
    finally:
        os.umask(before)
    assert stat.S_IMODE(run.interval_file.stat().st_mode) == 0o644


def test_links_that_a_task_left_are_replaced_and_not_followed(run: RunFolder, tmp_path: Path) -> None:
    """Without separate users a task can write in its folder. Files elsewhere stay as they are."""
    other = tmp_path / "other"
    other.write_text("kept")
    run.interval_file.symlink_to(other)
    run.interval_file.with_name("interval.json.tmp").symlink_to(other)
    write_interval(run, SiteInterval(90.0, time.time() + 600))
    assert other.read_text() == "kept" and not run.interval_file.is_symlink() and read(run) is not None


def test_an_infinite_interval_is_a_day(run: RunFolder) -> None:
    write_interval(run, SiteInterval(inf, time.time() + 600))
    assert read(run) is not None and read(run).interval_s == 86_400.0  # type: ignore[union-attr]


def test_a_folder_that_is_gone_is_an_error(run: RunFolder) -> None:
    run.path.rmdir()
    with pytest.raises(FileNotFoundError):
        write_interval(run, SiteInterval(90.0, 4e9))


@pytest.mark.parametrize(
    "arguments",
    [
        (0.5, 4e9), (float("nan"), 4e9), (60.0, inf), (60.0, 4e9, -1.0), (60.0, 4e9, None, 0.0),
        (60.0, 4e9, None, 30.0, -1.0), (60.0, 4e9, None, 30.0, 0.0, -1.0),
    ],
)  # fmt: skip
def test_values_that_the_sdk_would_ignore_are_refused(run: RunFolder, arguments: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="a value is out of the range"):
        write_interval(run, SiteInterval(*arguments))
    assert not run.interval_file.exists()
