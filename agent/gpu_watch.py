"""Watches the GPUs of this machine for errors after which no new work should start on it.

An Xid is an error that NVIDIA's driver reports. Most are caused by the program that uses the GPU (13, 31, 43, 45), and
end it; those in `_CRITICAL` are faults of the GPU, its memory or its links, which the next program would meet, too. The
file `gpus.json` of the state folder has what was noticed since the boot.
"""

import asyncio
import json
import logging
import time
from dataclasses import asdict

from agent import nvml, records
from agent.state import StateFolder
from domain.protocol.machines import GpuFault

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
_LOOK_S = 2.0
_COUNT_EVERY = 15
"""The counters of memory errors are read at each of so many looks."""
_log = logging.getLogger(__name__)


class GpuWatch:
    """The GPUs of a machine, and their last fault since the boot."""

    def __init__(self, state: StateFolder, slots: int) -> None:
        """`slots` is the number of GPUs that the machine offers; faults of others do not count."""
        self._path = state.path / "gpus.json"
        self._slots = slots
        self._boot = state.incarnation()
        self._errors: dict[str, int] = {}
        """Number of uncorrectable errors that were noticed, by UUID."""
        self.fault: GpuFault | None = None
        self.changed = asyncio.Event()
        """Set when there is a new fault. The waiting task must clear it."""
        try:
            body = json.loads(self._path.read_bytes())
            if body["boot"] == self._boot:
                self._errors = body["errors"]
                self.fault = None if body["fault"] is None else GpuFault(**body["fault"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s: unreadable, so known faults of GPUs are reported again: %s", self._path, error)

    async def run(self) -> None:
        """Looks for faults until cancelled. Returns at once if the machine offers no GPUs that NVML shows."""
        if not self._slots or not await asyncio.to_thread(nvml.devices):
            return
        xids = await asyncio.to_thread(nvml.Xids)
        looks = 0
        while True:
            if await asyncio.to_thread(self._look, xids, counts=looks % _COUNT_EVERY == 0):
                self.changed.set()
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
        try:
            fault = None if self.fault is None else asdict(self.fault)
            records.write_durably(str(self._path), {"boot": self._boot, "errors": self._errors, "fault": fault})
        except OSError as error:
            _log.warning("%s: cannot be written: %s", self._path, error)
        return bool(ours)
