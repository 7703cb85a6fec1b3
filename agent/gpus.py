"""Checks whether GPUs of this machine are free: no process has opened them, and their memory is reported as free.

GPUs are numbered in the order of their PCI bus addresses, without GPUs that the driver excludes. `nvidia-smi` uses the
same numbers, and so does CUDA with `CUDA_DEVICE_ORDER=PCI_BUS_ID`. The device file of a GPU has another number, the
minor number, which the driver shows in `/proc/driver/nvidia/gpus`. If the driver does not show it, for example in some
containers, the GPUs are assumed to be in the order of their minor numbers.

Asks NVML (`agent.nvml`), or without it, reads `/proc` and calls `nvidia-smi`. A machine whose GPUs are only declared,
as in an embedded fleet, has no device files. Its GPUs are free when no task runs.
"""

import contextlib
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from agent import nvml
from agent.nvml import Gpu

FREE_BYTES = 256 << 20
"""A GPU that reports less used memory than this is free: the driver itself uses some."""
_QUERY_S = 5.0
_MACHINE = Path("/")
_DEVICE = re.compile(r"nvidia(\d+)")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GpuUse:
    """The measured use of some GPUs."""

    holders: tuple[int, ...] = ()
    """Ids of processes that have one of the GPUs open."""
    used_bytes: dict[int, int] = field(default_factory=dict)
    """Used memory of each GPU that reports more than `FREE_BYTES`."""
    unknown: str | None = None
    """Why the memory could not be read; None: it was read, or the machine has no GPUs."""

    @property
    def is_free(self) -> bool:
        """Whether it is known that nothing uses the GPUs."""
        return not self.holders and not self.used_bytes and self.unknown is None


def gpu_use(gpus: Iterable[int], root: Path = _MACHINE) -> GpuUse:
    """Returns the use of the GPUs with these numbers. Takes up to some seconds; processes of other users may be missed.

    Only root sees the open files of other users' processes. `root` contains `dev` and `proc/driver`; NVML is asked only
    about this machine.
    """
    if root == _MACHINE and (found := nvml.uses()) is not None:
        uses = {gpu: found[gpu] for gpu in gpus if gpu < len(found)}
        holders = {pid for use in uses.values() for pid in use.pids}
        used = {gpu: use.used_bytes for gpu, use in uses.items() if use.used_bytes > FREE_BYTES}
        return GpuUse(tuple(sorted(holders)), used)
    shown = numbered_gpus(root)
    # The machine may declare more GPUs than the driver shows. These have no device file.
    devices = {gpu: root / "dev" / f"nvidia{shown[gpu].minor}" for gpu in gpus if gpu < len(shown)}
    there = {gpu: device for gpu, device in devices.items() if device.exists()}
    if not there:
        return GpuUse()
    used, unknown = _used_bytes(list(there), shown)
    return GpuUse(tuple(sorted(_holders({str(device) for device in there.values()}))), used, unknown)


def numbered_gpus(root: Path = _MACHINE) -> list[Gpu]:
    """Returns the GPUs of this machine in the order of their numbers. `root` contains `dev` and `proc/driver`."""
    if root == _MACHINE and (devices := nvml.devices()) is not None:
        return devices
    if found := _shown(root):
        return nvml.offered(found)
    names: list[str] = []
    with contextlib.suppress(FileNotFoundError):
        names = os.listdir(root / "dev")  # noqa: PTH208 - only names are needed
    minors = sorted(int(match[1]) for match in map(_DEVICE.fullmatch, names) if match)
    return nvml.offered([Gpu(minor) for minor in minors])


def _shown(root: Path) -> list[Gpu]:
    """Returns the GPUs that the driver shows and does not exclude, in the order of the bus; empty if there are none."""
    found: list[Gpu] = []
    folder = root / "proc/driver/nvidia/gpus"
    if not folder.is_dir():
        return found
    for file in folder.glob("*/information"):
        try:
            lines = [line.partition(":") for line in file.read_text().splitlines()]
            about = {name.strip(): value.strip() for name, _, value in lines}
            if about.get("GPU Excluded", "No") == "No":
                found.append(Gpu(int(about["Device Minor"]), _bus(file.parent.name)))
        except (OSError, ValueError, KeyError) as error:
            _log.warning("%s: unreadable, so the order of the GPUs is guessed: %s", file, error)
            return []
    return sorted(found, key=lambda gpu: gpu.bus)


def _bus(name: str) -> tuple[int, ...]:
    """Returns the numbers in a PCI address: `0000:4f:00.0`, or `00000000:4F:00.0` as `nvidia-smi` writes it."""
    return tuple(int(part, 16) for part in name.strip().replace(".", ":").split(":"))


def _holders(names: set[str]) -> set[int]:
    found = set()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            descriptors = [entry.name for entry in os.scandir(process / "fd")]
        except OSError:  # The process has ended, or belongs to another user.
            continue
        for name in descriptors:
            try:
                target = (process / "fd" / name).readlink()
            except OSError:
                continue
            if str(target) in names:
                found.add(int(process.name))
                break
    return found


def _used_bytes(gpus: list[int], shown: list[Gpu]) -> tuple[dict[int, int], str | None]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}, "nvidia-smi is not installed, so the memory of the GPUs is unknown"
    command = [program, "--query-gpu=index,pci.bus_id,memory.used", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_S, check=True).stdout
        numbers = {gpu.bus: number for number, gpu in enumerate(shown) if gpu.bus}
        fields = [line.split(",") for line in said.splitlines()]
        mebibytes = {numbers.get(_bus(bus), int(index)): int(used) for index, bus, used in fields}
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {}, f"nvidia-smi failed, so the memory of the GPUs is unknown: {error}"
    used = {gpu: mebibytes.get(gpu, 0) << 20 for gpu in gpus}
    return {gpu: size for gpu, size in used.items() if size > FREE_BYTES}, None
