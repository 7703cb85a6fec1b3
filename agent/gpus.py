"""Whether GPUs of this machine are free: no process has them open, and their memory reads free.

Reads `/proc` and calls `nvidia-smi`. A machine whose GPUs are only declared, as in an embedded fleet, has no device
files: then there is nothing to hold, and the GPUs are free when no task runs.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

FREE_BYTES = 256 << 20
"""A GPU that reports less used memory than this is free: the driver itself uses some."""
_QUERY_S = 5.0


@dataclass(frozen=True)
class GpuUse:
    """What is known about the use of some GPUs."""

    holders: tuple[int, ...] = ()
    """Ids of processes that have one of the GPUs open."""
    used_bytes: dict[int, int] = field(default_factory=dict)
    """Used memory of each GPU that reports more than `FREE_BYTES`."""
    unknown: str | None = None
    """Why the memory could not be read; None: it could, or there is none."""

    @property
    def is_free(self) -> bool:
        """Whether it is known that nothing uses the GPUs."""
        return not self.holders and not self.used_bytes and self.unknown is None


def gpu_use(gpus: Iterable[int], devices: Path = Path("/dev")) -> GpuUse:
    """Returns who uses the GPUs with these indices. Takes up to some seconds; a process of another user may be missed.

    Only root sees the open files of other users' processes. The index of a GPU is taken for the number of its device
    file; they differ where the driver numbers devices in another order than their bus.
    """
    there = [gpu for gpu in gpus if (devices / f"nvidia{gpu}").exists()]
    if not there:
        return GpuUse()
    names = {str(devices / f"nvidia{gpu}") for gpu in there}
    used, unknown = _used_bytes(there)
    return GpuUse(tuple(sorted(_holders(names))), used, unknown)


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


def _used_bytes(gpus: list[int]) -> tuple[dict[int, int], str | None]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}, "nvidia-smi is not installed, so the memory of the GPUs is unknown"
    command = [program, "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_S, check=True).stdout
        fields = [line.split(",") for line in said.splitlines()]
        mebibytes = {int(index): int(used) for index, used in fields}
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {}, f"nvidia-smi failed, so the memory of the GPUs is unknown: {error}"
    used = {gpu: mebibytes.get(gpu, 0) << 20 for gpu in gpus}
    return {gpu: size for gpu, size in used.items() if size > FREE_BYTES}, None
