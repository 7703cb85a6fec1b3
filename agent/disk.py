"""Limits the disk space that the tasks of an attempt use on this machine.

Their working directories, `/tmp`, `/var/tmp` and output are in the attempt's folder. Together they may have the
attempt's share of the machine's disk (`DiskPool`). The kernel's project quotas would need a mount option that few
machines have, so the agent measures. Measuring takes time for each file, so the agent first checks the use of the whole
file system: the attempt cannot have written more than the growth of the file system. Files that were deleted and are
still open count, too. Tasks of an attempt with more than its limit are killed at once, because they would continue to
write.

    disk.json   in the attempt's folder: its limit, and what it had when it was last measured (`agent.records`)
    disk.json   in a task's folder: set if the task was stopped for the limit (`DiskReport`)
"""

import asyncio
import contextlib
import logging
import math
import os
import stat
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from agent import records, shim, tasks
from agent.cgroups import processes_below
from agent.config import AgentConfig
from agent.record_files import read_sound
from agent.sandbox import remove_tree
from agent.state import AttemptFolder, StateFolder
from agent.tasks import RunFolder
from domain.launch import TaskPlace
from domain.task_reports import DiskReport

_FILE = "disk.json"
_BLOCK_BYTES = 512
"""Unit of `st_blocks`, in bytes."""
_LEAST_BYTES, _LEAST_FILES = 256 << 20, 10_000
"""Minimum limit of an attempt, however small its share, if the machine has this much free space."""
_FASTEST_BYTES_S, _FASTEST_FILES_S = 4e9, 4e5
"""Assumed maximum speed at which a disk is filled. It determines how often the agent checks the file system."""
_SHORTEST_S, _LONGEST_S = 0.05, 1.0
_POOL_S = 1.0
"""How long a measurement of the machine's space is reused, in seconds."""
_UNCOUNTED = 1 << 62
"""Stands for the number of files that a file system without inodes could have."""
_MEASURE_EVERY_S = 60.0
"""Longest interval of measurements, even without growth: other processes may delete files meanwhile."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DiskUse:
    """Disk space and number of files, of a folder or of a file system."""

    size_bytes: int = 0
    files: int = 0

    def __add__(self, other: Self) -> "DiskUse":
        return DiskUse(self.size_bytes + other.size_bytes, self.files + other.files)

    def grown_since(self, before: Self) -> "DiskUse":
        """Returns by how much this is more than `before`, at least 0."""
        return DiskUse(max(0, self.size_bytes - before.size_bytes), max(0, self.files - before.files))

    def exceeds(self, limit: Self) -> bool:
        """Whether this is more than `limit` in bytes or in files."""
        return self.size_bytes > limit.size_bytes or self.files > limit.files


class DiskPool:
    """The disk space of this machine that attempts share: the free space plus the space that running attempts use."""

    def __init__(self, config: AgentConfig, state: StateFolder) -> None:
        self._config = config
        self._state = state
        self._lock = threading.Lock()
        self._pool, self._read_s = DiskUse(), -math.inf

    def limit_of(self, attempt: AttemptFolder, places: Sequence[TaskPlace]) -> DiskUse | None:
        """Returns the disk limit of the tasks at `places`, which are all tasks of the attempt on this machine.

        This is `AgentConfig.disk_fraction` of the pool, times the largest of the tasks' shares of the machine's GPUs,
        CPUs and memory. It is determined once for an attempt. None: there is no limit.
        """
        config = self._config
        if config.disk_fraction is None:
            return None
        kept = read_sound(attempt.path / _FILE)
        if kept:
            return DiskUse(**kept["limit"])
        pool = self._now()
        shares = [sum(place.cpus_milli for place in places) / config.cpus_milli]
        shares.append(sum(place.memory_bytes for place in places) / config.task_memory_bytes)
        if config.gpus:
            shares.append(sum(len(place.slots) for place in places) / config.gpus)
        part = config.disk_fraction * min(1.0, max(shares))
        size_bytes = max(int(part * pool.size_bytes), min(_LEAST_BYTES, int(config.disk_fraction * pool.size_bytes)))
        files = max(int(part * pool.files), min(_LEAST_FILES, int(config.disk_fraction * pool.files)))
        limit = DiskUse(size_bytes, files)
        records.publish(str(attempt.path / _FILE), {"limit": asdict(limit), "used": asdict(DiskUse())})
        return limit

    def _now(self) -> DiskUse:
        """Returns the size of the pool, measured at most `_POOL_S` seconds ago: measuring it can take long."""
        with self._lock:
            if time.monotonic() - self._read_s > _POOL_S:
                disk = os.statvfs(self._state.path)
                pool = DiskUse(disk.f_bavail * disk.f_frsize, disk.f_favail)
                for one in self._state.unfinished():
                    if body := read_sound(one.path / _FILE):
                        pool += DiskUse(**body["used"])
                # Some file systems do not count files.
                self._pool = pool if disk.f_files else replace(pool, files=_UNCOUNTED)
                self._read_s = time.monotonic()
            return self._pool


def measure(folders: Iterable[Path], pids: Iterable[int] = ()) -> tuple[DiskUse, bool]:
    """Returns the disk use of the folders and of open deleted files of the processes, and whether it is complete.

    It is not complete if a folder cannot be read, or its path is too long. Links are not followed, and other file
    systems are left out. Takes a second for some 100,000 files.
    """
    seen: set[int] = set()
    size_bytes, files, is_all = 0, 0, True

    def count(status: os.stat_result) -> None:
        nonlocal size_bytes, files
        if status.st_nlink > 1 or status.st_nlink == 0:
            if status.st_ino in seen:
                return
            seen.add(status.st_ino)
        size_bytes += status.st_blocks * _BLOCK_BYTES
        files += 1

    ahead, device = [], None
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            device = folder.lstat().st_dev
            ahead.append(str(folder))
    while ahead:
        try:
            with os.scandir(ahead.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if status.st_dev != device:
                            continue
                        if stat.S_ISDIR(status.st_mode):
                            ahead.append(entry.path)
                            size_bytes += status.st_blocks * _BLOCK_BYTES
                            files += 1
                        else:
                            count(status)
        except (FileNotFoundError, NotADirectoryError):
            continue  # It was removed meanwhile.
        except OSError:
            is_all = False
    for pid in pids:
        for kind in ("fd", "map_files"):
            with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/{kind}") as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        status = entry.stat()
                        if status.st_nlink == 0 and status.st_dev == device and stat.S_ISREG(status.st_mode):
                            count(status)
    return DiskUse(size_bytes, files), is_all


def disk_report(run: RunFolder) -> DiskReport | None:
    """Returns why the agent stopped the task, if it did so because its attempt had used up the disk."""
    body = read_sound(run.path / _FILE)
    return DiskReport(**body) if body else None


class DiskWatch:
    """Watches the disk use of the tasks of one attempt, and stops them if it exceeds their limit."""

    def __init__(self, attempt: AttemptFolder, runs: Sequence[RunFolder], limit: DiskUse) -> None:
        self._attempt = attempt
        self._runs = runs
        self._limit = limit
        self.exceeded = False
        self._used = DiskUse()
        self._whole: DiskUse | None = None
        """Use of the whole file system when the attempt used `_used`; None: the attempt was not measured yet."""

    def begin(self) -> None:
        """Measures the attempt before its tasks start. No other measurement is needed until the file system grows.

        Blocks.

        Raises:
            OSError: the folder cannot be read.
        """
        self._whole = self._now()
        self._used, _ = measure([self._attempt.path])
        self._save()

    async def keep(self) -> None:
        """Watches until cancelled, or until it has stopped the tasks. Errors are logged and do not end it."""
        while not self.exceeded:
            try:
                await self._watch()
            except OSError as error:
                _log.warning("the disk space of %s cannot be watched, retrying: %s", self._attempt.key, error)
                await asyncio.sleep(_LONGEST_S)

    async def finish(self) -> None:
        """Measures again after the end of the tasks if they may have filled the disk, and one has failed because of it.

        Removes the working directories if the limit was reached, because the next attempt needs the space. The output
        and the report stay.
        """
        try:
            now = await asyncio.to_thread(self._now)
            if not self.exceeded and (self._whole is None or self._at_most(now).exceeds(self._limit)):
                used, _ = await asyncio.to_thread(measure, [self._attempt.path])
                if used.exceeds(self._limit):
                    await self._stop(used)
        except OSError as error:
            _log.warning("the disk space of %s cannot be measured: %s", self._attempt.key, error)
        if self.exceeded or any(disk_report(run) is not None for run in self._runs):
            await asyncio.gather(*(asyncio.to_thread(remove_tree, run.work) for run in self._runs))

    async def _watch(self) -> None:
        due_s = took_s = 0.0
        if self._whole is not None:
            due_s = time.monotonic() + _MEASURE_EVERY_S
            await self._pause(self._used)
        while True:
            now = await asyncio.to_thread(self._now)
            at_most = self._at_most(now)
            if self._whole is None or at_most.exceeds(self._limit) or time.monotonic() > due_s:
                began_s = time.monotonic()
                found, is_all = await asyncio.to_thread(measure, [self._attempt.path], self._pids())
                took_s = time.monotonic() - began_s
                due_s = time.monotonic() + max(_MEASURE_EVERY_S, 20 * took_s)
                # If tasks hide files from the agent, the upper bound is used.
                self._used = found if is_all else max(found, at_most, key=lambda use: use.size_bytes)
                self._whole = now
                if self._used.exceeds(self._limit):
                    if await self._stop(self._used):
                        return
                else:
                    await asyncio.to_thread(self._save)
                await asyncio.sleep(took_s)
                at_most = self._used
            await self._pause(at_most)

    async def _pause(self, at_most: DiskUse) -> None:
        """Waits for the time in which the attempt, which uses at most `at_most` now, cannot reach its limit."""
        left_bytes, left_files = self._limit.size_bytes - at_most.size_bytes, self._limit.files - at_most.files
        pause_s = min(left_bytes / _FASTEST_BYTES_S, left_files / _FASTEST_FILES_S)
        await asyncio.sleep(min(_LONGEST_S, max(_SHORTEST_S, pause_s)))

    def _at_most(self, now: DiskUse) -> DiskUse:
        """Returns an upper bound of the attempt's disk use, given the use of the whole file system."""
        return self._used + now.grown_since(self._whole or now)

    def _now(self) -> DiskUse:
        disk = os.statvfs(self._attempt.path)
        return DiskUse((disk.f_blocks - disk.f_bfree) * disk.f_frsize, disk.f_files - disk.f_ffree)

    def _save(self) -> None:
        body = {"limit": asdict(self._limit), "used": asdict(self._used)}
        records.publish(str(self._attempt.path / _FILE), body)

    def _pids(self) -> set[int]:
        shims = {identities[0].pid for run in self._runs if (identities := run.identities()) is not None}
        # Containers are no descendants of their shims.
        inside = [cgroup for run in self._runs if run.container() and (cgroup := run.unified_cgroup()) is not None]
        return shim.descendants(shims).union(*(processes_below(str(cgroup)) for cgroup in inside))

    async def _stop(self, used: DiskUse) -> bool:
        """Records that the limit was reached and kills the tasks. Returns False if that could not be recorded.

        The end of a task without the record could be mistaken for a success. Among the tasks that run or have failed,
        the record names the one with the largest folder. Nothing is recorded if the attempt was already asked to stop.
        """
        ends = {run.path: run.exit() for run in self._runs}
        guilty = [run for run in self._runs if (end := ends[run.path]) is None or not (end.succeeded or end.noticed)]
        by_size = await asyncio.to_thread(lambda: {run.path: measure([run.path])[0].size_bytes for run in guilty})
        body = asdict(DiskReport(used.size_bytes, self._limit.size_bytes, used.files, self._limit.files))

        def stop(run: RunFolder) -> None:
            tasks.request_stop(run, 0.0, told=False)

        try:
            if guilty and all(run.stop() is None for run in guilty):
                largest = max(guilty, key=lambda run: by_size[run.path])
                await asyncio.to_thread(records.write_reserved, str(largest.path / _FILE), body)
        except OSError as error:
            _log.warning("that %s has used up its disk cannot be recorded: %s", self._attempt.key, error)
            return False
        self.exceeded = True
        await asyncio.gather(*(asyncio.to_thread(stop, run) for run in guilty if ends[run.path] is None))
        return True


def reserve_report(run: RunFolder) -> None:
    """Reserves the disk space for the record that a task was stopped for its limit. Must be called before its start.

    Raises:
        OSError: the disk is full.
    """
    records.reserve(str(run.path / _FILE))
