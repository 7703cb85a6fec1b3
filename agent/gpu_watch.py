"""Watches the GPUs of this machine: errors, memory that ended tasks still occupy, and utilisation.

An Xid is an error that NVIDIA's driver reports. Most are caused by the program that uses the GPU (13, 31, 43, 45), and
end it; those in `_CRITICAL` are faults of the GPU, its memory or its links, which the next program would meet, too. The
file `gpus.json` of the state folder stores the findings since the boot.

The driver frees the memory of a process when it ends. If that takes longer than the end of the task, for example
because the process hangs in the kernel, the next task would find too little memory. Its slot is then withheld.
"""

import asyncio
import json
import logging
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import mean

from agent import nvml, records, tasks
from agent.gpus import FREE_BYTES
from agent.shim import process_stat
from agent.state import AttemptFolder, StateFolder
from agent.tasks import TaskState
from domain.protocol.machines import GpuFault
from domain.task_reports import GpuReport

_CRITICAL = {
    48: "uncorrectable memory error",
    63: "a row of its memory was remapped",
    64: "a row of its memory could not be remapped",
    74: "NVLink error",
    79: "it has fallen off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "its system processor does not answer",
    120: "error of its system processor",
    140: "unrecovered memory error",
}
"""Xid errors that are faults of a GPU."""
_FREE_S = 5.0
"""How long the end of an attempt on this machine waits until the memory of its GPUs is free."""
_FREE_POLL_S = 0.1
_LOOK_S = 2.0
_MEASURED_EVERY = 2
"""Memory and utilisation are read at every n-th check."""
_SAMPLES = 5
"""Number of utilisation samples that are averaged for a report."""
_PERCENT_STEP, _BYTES_STEP = 5, 1 << 27
_COUNT_EVERY = 15
"""The counters of memory errors are read at every n-th check."""
_log = logging.getLogger(__name__)


class GpuWatch:
    """Watches the GPUs of a machine: the last fault since the boot, and slots whose memory was not freed."""

    def __init__(self, state: StateFolder, machine: str, slots: int) -> None:
        """`slots` is the number of GPUs that the machine offers; faults of other GPUs are ignored."""
        self._state, self._machine = state, machine
        self._path = state.path / "gpus.json"
        self._slots = slots
        self._boot = state.incarnation()
        self._errors: dict[str, int] = {}
        """Number of uncorrectable errors seen so far, by UUID."""
        self.fault: GpuFault | None = None
        self._unfreed: dict[int, int] = {}
        """Slots whose memory was not freed, with the start (`ProcessIdentity.start`) of the attempt that left it."""
        self._uses: list[nvml.Use] = []
        self._percents: dict[int, deque[int]] = defaultdict(lambda: deque(maxlen=_SAMPLES))
        self.changed = asyncio.Event()
        """Set when there is a new fault, or the unfreed slots have changed. The waiting task must clear it."""
        try:
            body = json.loads(self._path.read_bytes())
            if body["boot"] == self._boot:
                self._errors = body["errors"]
                self.fault = None if body["fault"] is None else GpuFault(**body["fault"])
                self._unfreed = {int(slot): int(since) for slot, since in body["unfreed"].items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s: unreadable, so known faults of GPUs are reported again: %s", self._path, error)

    @property
    def unfreed(self) -> int:
        """Bit mask of the slots whose memory an ended attempt still occupies."""
        return sum(1 << slot for slot in self._unfreed)

    def report(self, slots: Sequence[int]) -> GpuReport | None:
        """Returns the GPU use of a task with these slots; None: it has no GPUs, or they are not measured."""
        known = [slot for slot in slots if slot < len(self._uses)]
        if not known:
            return None
        percent = mean(mean(self._percents[slot]) for slot in known)
        used_bytes = sum(self._uses[slot].used_bytes for slot in known)
        return GpuReport(
            len(known), _PERCENT_STEP * round(percent / _PERCENT_STEP), _BYTES_STEP * round(used_bytes / _BYTES_STEP)
        )

    async def until_freed(self, folder: AttemptFolder) -> None:
        """Waits until the memory of an attempt's GPUs is free, at most `_FREE_S`; then withholds GPUs that are not.

        Call it after all tasks of the attempt on this machine have ended.
        """
        if not self._slots or not await asyncio.to_thread(nvml.uses):
            return
        held = await asyncio.to_thread(self._held_by, folder)
        give_up_s = time.monotonic() + _FREE_S
        while left := await asyncio.to_thread(self._left_by, folder, held):
            if time.monotonic() > give_up_s:
                break
            await asyncio.sleep(_FREE_POLL_S)
        if left.keys() - self._unfreed.keys():
            _log.error("%s: memory of GPUs %s was not freed; they take no work until it is", folder.key, sorted(left))
            self._unfreed |= left
            self._write()
            self.changed.set()

    def _held_by(self, folder: AttemptFolder) -> dict[int, int]:
        """Returns the slots of the attempt's started tasks, and the start time of the first of these tasks."""
        try:
            launch = folder.launch()
        except (OSError, ValueError) as error:
            _log.warning("%s: whether its GPUs are free is not checked: %s", folder.key, error)
            return {}
        starts = [identities[0].start for run in folder.runs() if (identities := run.identities()) is not None]
        if launch is None or not starts:
            return {}
        return dict.fromkeys((slot for place in launch.on_machine(self._machine) for slot in place.slots), min(starts))

    def _left_by(self, folder: AttemptFolder, held: Mapping[int, int]) -> dict[int, int]:
        """Returns the slots in `held` that leftover processes of the attempt still use."""
        left = self._left(held)
        for other in self._state.unfinished(but=folder) if left else ():
            if any(tasks.inspect(run) is TaskState.RUNNING for run in other.runs()):
                left = {slot: start for slot, start in left.items() if slot not in self._held_by(other)}
        return left

    @staticmethod
    def _left(slots: Mapping[int, int]) -> dict[int, int]:
        """Returns which of `slots` are in use by at least one process that began after the given start."""
        uses = nvml.uses() or []
        return {slot: start for slot, start in slots.items() if slot < len(uses) and _is_left(uses[slot], start)}

    async def run(self) -> None:
        """Checks for faults until cancelled. Returns at once if the machine offers no GPUs that NVML reports."""
        if not self._slots or not await asyncio.to_thread(nvml.devices):
            return
        xids = await asyncio.to_thread(nvml.Xids)
        looks = 0
        while True:
            if await asyncio.to_thread(self._look, xids, counts=looks % _COUNT_EVERY == 0):
                self.changed.set()
            if held := dict(self._unfreed):  # Others may be added during the check.
                left = await asyncio.to_thread(self._left, held)
                freed = [slot for slot in held if slot not in left]
                for slot in freed:
                    _log.warning("the memory of GPU %d is free again", slot)
                    del self._unfreed[slot]
                if freed:
                    await asyncio.to_thread(self._write)
                    self.changed.set()
            if looks % _MEASURED_EVERY == 0:
                uses: list[nvml.Use] | None = await asyncio.to_thread(nvml.uses)
                self._uses = uses or []
                for slot, use in enumerate(self._uses):
                    self._percents[slot].append(use.percent)
            looks += 1
            await asyncio.sleep(_LOOK_S)

    def _look(self, xids: nvml.Xids, *, counts: bool) -> bool:
        """Returns whether there is a new fault. `counts`: the counters of memory errors are read, too."""
        found = [(uuid, f"Xid {xid}: {_CRITICAL[xid]}") for uuid, xid in xids.read() if xid in _CRITICAL]
        errors = nvml.uncorrected_errors() if counts else {}
        new = {uuid: count for uuid, count in errors.items() if count > self._errors.get(uuid, 0)}
        found += [(uuid, f"{count} uncorrectable memory errors (ECC)") for uuid, count in sorted(new.items())]
        if not found:
            return False
        self._errors |= new
        slots = {gpu.uuid: slot for slot, gpu in enumerate(nvml.devices() or ()) if slot < self._slots}
        ours = [(uuid, error) for uuid, error in found if uuid in slots]
        for uuid, error in ours:
            _log.error("GPU %d (%s): %s", slots[uuid], uuid, error)
            self.fault = GpuFault(slots[uuid], uuid, error, time.time())
        self._write()
        return bool(ours)

    def _write(self) -> None:
        fault = None if self.fault is None else asdict(self.fault)
        body = {"boot": self._boot, "errors": self._errors, "fault": fault, "unfreed": self._unfreed}
        try:
            records.write_durably(str(self._path), body)
        except OSError as error:
            _log.warning("%s: cannot be written: %s", self._path, error)


def _is_left(use: nvml.Use, start: int) -> bool:
    others = 0
    for pid in use.pids:
        stat = process_stat(pid)
        if stat is None or stat[0] in "ZX" or stat[2] >= start:
            return True
        others += use.process_bytes[pid]  # For example the desktop of the machine's owner.
    return use.used_bytes - others > FREE_BYTES
