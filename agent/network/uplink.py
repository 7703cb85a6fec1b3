"""Measures the bandwidth that is available for uploads of checkpoints, every 100 ms (ReclaimNet V-E, F3).

A sample is the rate of the interface between two readings of its counter, while a connection waited for the link: it
had bytes to send at both readings, and its peer did not limit it (`agent.network.counters`). An idle link is no sample:
its counter says only that nothing was sent. While the kernel shapes migrations, a sample counts only if each of them
stayed below the rate of its class, by the eBPF counters: otherwise the class, and not the link, determined what was
sent.

Samples are averaged over blocks of `BLOCK_S` of sending, however long the pauses between the transfers are. The mean
and the lower bound (`bound_of`) are computed from the newest blocks, and only from at least `ENOUGH_BLOCKS` of them:
with fewer, the bound at the usual confidence would be below all blocks, and say little about the link. The blocks are
kept in a file of the state folder while the agent restarts. They are valid for one boot, because their times are of a
clock that starts with it, and for one interface.
"""

import asyncio
import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from agent import records, shim
from agent.network.counters import InterfaceCounter, WaitingConnections
from agent.network.edge import MigrationFlow
from agent.network.machine import MachineNetwork, default_interface
from domain.task_reports import BandwidthReport

_log = logging.getLogger(__name__)


_MOST_FILE_BYTES = 16_384

Block = tuple[float, float]
"""When a block ended, in seconds since the boot, and its rate in bytes per second."""


@dataclass(frozen=True)
class KeptBlocks:
    """Stored blocks of one interface, the oldest first."""

    index: int
    """The interface's number."""
    blocks: tuple[Block, ...] = ()


class BlockFile:
    """The file with the blocks. Its methods block, and never raise because of errors or damaged content of the disk."""

    def __init__(self, path: Path, most_blocks: int, most_bytes_s: float) -> None:
        """Prepares the file; it need not exist. More blocks than `most_blocks`, or faster ones, are not valid."""
        self._path, self._most_blocks, self._most_bytes_s = path, most_blocks, most_bytes_s

    def read(self) -> KeptBlocks | None:
        """Returns the blocks written last in this boot; None: there are none, or the file is not valid."""
        try:
            with open(self._path, "rb") as file:
                content = file.read(_MOST_FILE_BYTES + 1)
            if len(content) > _MOST_FILE_BYTES:
                raise ValueError(f"more than {_MOST_FILE_BYTES} bytes")
            body = json.loads(content)
            if not isinstance(body, dict):
                raise ValueError("not a JSON object")
            return self._checked(body) if body.get("boot_id") == shim.boot_id() else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, OverflowError, RecursionError) as error:
            _log.warning("%s: ignored, the bandwidth is measured again: %s", self._path, error)
            return None

    def write(self, kept: KeptBlocks) -> None:
        """Replaces the file. If that fails, the file stays as it was, and the next call tries it again."""
        blocks = [[round(at_s, 3), round(bytes_s)] for at_s, bytes_s in kept.blocks]
        try:
            records.write_durably(str(self._path), {"boot_id": shim.boot_id(), "index": kept.index, "blocks": blocks})
        except OSError as error:
            _log.warning("%s: the measured bandwidth is not kept: %s", self._path, error)

    def _checked(self, body: dict[str, Any]) -> KeptBlocks:
        index, blocks = body.get("index"), body.get("blocks")
        if not isinstance(index, int) or isinstance(index, bool) or index < 1:
            raise ValueError(f"index={index!r}: must be the number of an interface, 1 or more")
        if not isinstance(blocks, list) or len(blocks) > self._most_blocks:
            raise ValueError(f"blocks: must be a list of at most {self._most_blocks}")
        found: list[Block] = []
        for block in blocks:
            if not isinstance(block, list) or len(block) != 2 or not all(type(part) in (int, float) for part in block):
                raise ValueError(f"block {str(block)[:100]}: must be two numbers")
            at_s, bytes_s = float(block[0]), float(block[1])
            if not (math.isfinite(at_s) and at_s >= (found[-1][0] if found else 0.0)):
                raise ValueError(f"block {block}: its time must be finite and not before that of the previous block")
            if not 0 <= bytes_s <= self._most_bytes_s:
                raise ValueError(
                    f"block {block}: its rate must be 0 or more and at most {self._most_bytes_s:g} bytes/s"
                )
            found.append((at_s, bytes_s))
        return KeptBlocks(index, tuple(found))


SAMPLE_S = 0.1
"""The time between two samples."""
CONFIDENCE = 0.95
"""The nominal probability that the next block is at least as fast as the bound. If neighbouring blocks are
alike, fewer are: about 90% (docs/reclaim.md)."""
SLACK = 1.25
"""A rate above this multiple of the capacity is treated as a counter error. A short burst may exceed the capacity."""
BLOCK_S = 2.0
"""The length of a block, in seconds of sending. Many checkpoints are sent in a few seconds."""
BLOCKS = 60
"""Number of newest blocks that are used: two minutes of sending."""
ENOUGH_BLOCKS = math.ceil(1 / (1 - CONFIDENCE) - 1e-9) - 1
"""The minimum number of blocks with which the bound is not below all of them."""
KEEP_S = 86400.0
"""Age limit of blocks: one day, so that every hour of the day is represented."""
_IDLE_S = 1.0
"""The interval of readings while nothing is sent."""
_QUIET_S = 2.0
"""How long nothing must have been sent before the interval becomes `_IDLE_S`."""
_QUIET_BYTES_S = 30_000.0
"""At a lower rate, if no connection waited at the last reading, the connections are not looked at: it costs more than
a reading of the counter."""
_LONGEST_S = 1.0
"""Maximum time between two readings of a sample: after a longer time, the machine may have been suspended."""
_FULL_SHARE = 0.9
"""A migration counts as limited by its class if it sends at this share of the class's rate, or faster."""
_STEADY_SHARE = 0.1
"""If a class's rate changes by more than this share, a new batch of readings begins."""
_SEGMENTS_BYTES = 1 << 17
"""Two of the largest segments: a class sends whole segments, so a slow one sends nothing for some time."""
_MOST_CPU_SHARE = 0.02
"""Readings become rarer if they would use more of one CPU, because the machine has very many connections."""
_KEEP_EACH_S = 60.0
"""The least time between two writes of the file with the blocks. A restart loses at most the blocks since."""
_REOPEN_S = 60.0
"""The interval at which the interface is looked up again by its name."""


def bound_of(rates_bytes_s: Sequence[float], confidence: float = CONFIDENCE) -> float:
    """Returns the lower confidence bound of the link's bandwidth, in bytes per second, from one block or more.

    The mean of the next block lies below the bound with probability 1 - `confidence`. The bound is the order statistic
    of the n blocks at position (n + 1) (1 - confidence), interpolated between neighbours, with the value 0 at position
    0. So with few blocks the bound is below all of them. No distribution is assumed, only that the next block is like
    the others.
    """
    ordered = [0.0, *sorted(rates_bytes_s)]
    position = min((len(rates_bytes_s) + 1) * (1 - confidence), len(rates_bytes_s))
    low = int(position)
    part = position - low
    return ordered[low] * (1 - part) + ordered[min(low + 1, len(rates_bytes_s))] * part


class Uplink:
    """Measures one interface. `run` takes the samples; `report` may be called in any thread."""

    def __init__(
        self,
        interface: str | None,
        most_bytes_s: float,
        network: MachineNetwork | None = None,
        clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
        file: BlockFile | None = None,
    ) -> None:
        """Prepares the measurement; it begins with `run`.

        Args:
            interface: its name; None: that of the default route. It may be missing, appear, and be another one later.
            most_bytes_s: an upper limit of the link's bandwidth. Samples far above it are treated as errors.
            network: the object that shapes migrations on the interface, if there is one.
            clock: returns seconds that also pass while the machine is suspended, and that no setting of the time
                changes.
            file: the blocks of an earlier agent, which is read at once, and replaced by `run`; None: they are not kept.
        """
        self._file = file
        self._kept = None if file is None else file.read()
        self._writing: asyncio.Task[None] | None = None
        self._written_at_s: float | None = None
        """The time of the newest block in the file."""
        self._interface, self._most_bytes_s, self._network, self._clock = interface, most_bytes_s, network, clock
        self._counter: InterfaceCounter | None = None
        self._waiting: WaitingConnections | None = None
        self._addresses: frozenset[bytes] = frozenset()
        self._measured_index: int | None = None
        self._next_open_s = -math.inf
        self._missing = False
        self._counters: list[float] = []
        self._times_s: list[float] = []
        self._pending: list[bool] = []
        """For each reading: whether a connection has waited for the link since the previous reading."""
        self._limits: Mapping[MigrationFlow, float] = {}
        self._classes: dict[MigrationFlow, tuple[float, float, float]] = {}
        """For each migration: bytes sent at the start of this batch and now, and bytes that its class has permitted."""
        self._samples: list[float] = []
        self._blocks: deque[tuple[float, float]] = deque(maxlen=BLOCKS)
        self._sent_at_s = -math.inf
        self._cost_s = 0.0

    async def run(self) -> None:
        """Takes samples until cancelled. The times of the readings do not drift. An error begins a new batch."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        is_failing = False
        write_due_s = due_s
        while True:
            began_s = time.perf_counter()
            try:
                period_s = self.measure()
                is_failing = False
            except Exception:
                if not is_failing:
                    _log.exception("interface %s: its bandwidth is not measured, retrying", self._interface or "")
                is_failing = True
                self._drop_readings()
                self.close()
                self._next_open_s = -math.inf
                period_s = _IDLE_S
            self._cost_s += 0.1 * (time.perf_counter() - began_s - self._cost_s)
            period_s = max(period_s, self._cost_s / _MOST_CPU_SHARE)
            if loop.time() >= write_due_s and self._write():
                write_due_s = loop.time() + _KEEP_EACH_S
            due_s += period_s * max(1, math.ceil((loop.time() - due_s) / period_s))
            await asyncio.sleep(due_s - loop.time())

    def _write(self) -> bool:
        """Starts to write new blocks to the file, in a thread: a disk that hangs must not stop the measurement.

        Returns whether it did.
        """
        is_busy = self._writing is not None and not self._writing.done()
        if self._file is None or self._measured_index is None or not self._blocks or is_busy:
            return False
        newest_s = self._blocks[-1][0]
        if newest_s == self._written_at_s:
            return False
        kept = KeptBlocks(self._measured_index, tuple(self._blocks))
        self._written_at_s = newest_s
        self._writing = asyncio.create_task(asyncio.to_thread(self._file.write, kept))
        return True

    def report(self) -> BandwidthReport | None:
        """Returns the mean and the lower confidence bound, in bytes on the wire per second; None: not measured yet."""
        now_s = self._clock()
        blocks = [(at_s, found) for at_s, found in tuple(self._blocks) if now_s - at_s <= KEEP_S]
        if len(blocks) < ENOUGH_BLOCKS:
            return None
        rates = [found for _, found in blocks]
        # By the age of the block, whatever the time of day was when it was measured.
        return BandwidthReport(time.time() - (now_s - blocks[-1][0]), sum(rates) / len(rates), bound_of(rates))

    def measure(self) -> float:
        """Takes one reading, and returns the time until the next one in seconds."""
        now_s = self._clock()
        sent = self._read(now_s)
        before = self._counters[-1] if self._counters else math.nan
        passed_s = now_s - self._times_s[-1] if self._times_s else math.inf
        was_pending = bool(self._pending) and self._pending[-1]
        moved = sent > before if was_pending else sent - before >= _QUIET_BYTES_S * passed_s
        if moved:
            self._sent_at_s = now_s
        pending = self._has_waiting(moved)
        changed = self._changes_classes()
        if changed:
            self._take()
        self._count_permitted(passed_s)
        if changed or passed_s > _LONGEST_S:
            self._counters.append(math.nan)
            self._times_s.append(now_s)
            self._pending.append(False)
        self._counters.append(sent)
        self._times_s.append(now_s)
        self._pending.append(pending)
        if not pending or len(self._counters) > BLOCK_S / SAMPLE_S:
            self._take()
        return SAMPLE_S if now_s - self._sent_at_s < _QUIET_S else _IDLE_S

    def close(self) -> None:
        """Closes the descriptors. Idempotent."""
        for one in (self._counter, self._waiting):
            if one is not None:
                one.close()
        self._counter = self._waiting = None

    def _read(self, now_s: float) -> float:
        """Returns the interface's counter; NaN: there is no interface."""
        if now_s >= self._next_open_s:
            self._open(now_s)
        if self._counter is None:
            return math.nan
        try:
            return float(self._counter.sent_bytes())
        except OSError:
            self._next_open_s = now_s + _IDLE_S  # The interface may come back.
            return math.nan

    def _open(self, now_s: float) -> None:
        """Looks the interface up by name. If it is another interface, the old blocks are dropped."""
        self.close()
        self._next_open_s = now_s + _REOPEN_S
        try:
            self._counter = InterfaceCounter(self._interface or default_interface())
            self._addresses = self._counter.addresses()
            self._waiting = WaitingConnections()
        except OSError as error:
            self.close()
            if not self._missing:
                _log.warning("interface %s: its bandwidth is not measured: %s", self._interface or "", error)
            self._missing = True
            return
        self._missing = False
        if self._counter.index != self._measured_index:
            self._measured_index = self._counter.index
            self._drop_readings()
            self._samples.clear()
            self._blocks.clear()
            self._take_kept(now_s)

    def _take_kept(self, now_s: float) -> None:
        """Continues with the blocks of an earlier agent, if this is the interface that it measured."""
        kept, self._kept = self._kept, None
        if kept is not None and kept.index == self._measured_index and all(at_s <= now_s for at_s, _ in kept.blocks):
            self._blocks.extend(kept.blocks)
            self._written_at_s = self._blocks[-1][0] if self._blocks else None

    def _has_waiting(self, moved: bool) -> bool:
        """Returns whether a connection has waited for the link since the last reading; `moved`: something was sent."""
        if self._waiting is None:
            return False
        if not moved:
            self._waiting.forget()
            return False
        try:
            return self._waiting.has_any(self._addresses)
        except OSError:
            return False

    def _changes_classes(self) -> bool:
        """Returns whether migrations have begun or ended, or their rates have changed much, since the last reading."""
        before, self._limits = self._limits, {} if self._network is None else self._network.limits
        if before.keys() != self._limits.keys():
            return True
        return any(abs(limit - before[flow]) > _STEADY_SHARE * limit for flow, limit in self._limits.items())

    def _count_permitted(self, passed_s: float) -> None:
        """Adds, for each migration, the bytes that its class has permitted since the last reading in this batch."""
        for flow, limit_bytes_s in self._limits.items():
            try:
                sent_bytes = float(self._network.sent(flow).wire_bytes) if self._network is not None else 0.0
            except KeyError:  # Another thread has just ended it.
                sent_bytes = math.inf
            first_bytes, _, permitted_bytes = self._classes.get(flow, (sent_bytes, 0.0, 0.0))
            permitted_bytes += limit_bytes_s * min(passed_s, _LONGEST_S)
            self._classes[flow] = (first_bytes, sent_bytes, permitted_bytes)

    def _is_limited_by_class(self) -> bool:
        """Returns whether a migration was limited by its class, not by the link, in this batch."""
        return any(
            not sent_bytes - first_bytes < _FULL_SHARE * permitted_bytes - _SEGMENTS_BYTES
            for first_bytes, sent_bytes, permitted_bytes in self._classes.values()
        )

    def _take(self) -> None:
        """Turns the readings into samples, and those into blocks. The next batch begins with the last reading."""
        if len(self._counters) > 1 and not self._is_limited_by_class():
            pairs = zip(pairwise(self._counters), pairwise(self._times_s), self._pending[1:], strict=True)
            for (before, after), (from_s, to_s), is_pending in pairs:
                # A missing reading is NaN; a restart sets the counter back.
                most_bytes = SLACK * self._most_bytes_s * (to_s - from_s)
                if is_pending and to_s > from_s and 0 <= after - before <= most_bytes:
                    self._samples.append((after - before) / (to_s - from_s))
        size = round(BLOCK_S / SAMPLE_S)
        while len(self._samples) >= size:
            self._blocks.append((self._times_s[-1], sum(self._samples[:size]) / size))
            del self._samples[:size]
        for readings in (self._counters, self._times_s, self._pending):
            del readings[:-1]
        self._classes.clear()
        self._count_permitted(0.0)

    def _drop_readings(self) -> None:
        self._counters.clear()
        self._times_s.clear()
        self._pending.clear()
        self._classes.clear()
