"""Lets a task open only the GPUs of its attempt on this machine. NCCL copies between these directly.

In a sandbox only the device files of these GPUs are visible. If the agent runs as root, in every mode of isolation,
rules on the cgroup of each task refuse to open the files of the other GPUs: a small eBPF program on the task's cgroup
v2, or, without it, the controller `devices` of cgroup v1. Either means is enough.

Programs see only GPUs whose files they can open, and number them from 0. So the numbers in `CUDA_VISIBLE_DEVICES` count
the GPUs of the attempt, as with Slurm's `ConstrainDevices` and in containers. Only NVIDIA GPUs have rules.
"""

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from agent.bpf import Hook, Instruction, Op, Program, ProgramType, attach_to_cgroup, load
from agent.cgroups import device_cgroup, remove_cgroup
from agent.gpus import numbered_gpus
from agent.nvml import Gpu

ROOT = Path("/")
"""Contains `dev`, `proc/driver` and `sys`."""
_NVIDIA = 195
_MINORS = 248
"""Minor numbers from this one on are no GPUs: they are control files that the driver's libraries need."""
_SHARED = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia-caps", "nvidia-caps-imex-channels")
"""Device files that do not belong to one GPU. Devices in `nvidia-caps` work only with the file of their GPU."""
_CHARACTER = 2
"""Type of character devices."""
_TYPE, _MAJOR, _MINOR = 0, 4, 8
"""Offsets of fields of `struct bpf_cgroup_dev_ctx`. The lower half of the first is the type of the device."""


@dataclass(frozen=True)
class HeldGpus:
    """The GPUs that an attempt holds on this machine, among all NVIDIA GPUs of the machine."""

    slots: tuple[int, ...]
    """The slots, ascending."""
    gpus: tuple[Gpu, ...]
    """All GPUs, in the order of the slots."""
    root: Path

    @classmethod
    def of(cls, slots: Iterable[int]) -> "HeldGpus":
        """Returns the GPUs of an attempt with these slots."""
        return cls(tuple(sorted(slots)), tuple(numbered_gpus(ROOT)), ROOT)

    def visible(self, slots: Iterable[int]) -> list[int]:
        """Returns the numbers that the GPUs in `slots` have for a task that can open only the attempt's GPUs."""
        return [self.slots.index(slot) for slot in slots]

    def ids(self) -> tuple[str, ...]:
        """Returns the UUIDs of the attempt's GPUs, or their numbers if the driver does not tell the UUIDs.

        Slots of a machine without GPUs, on which they are emulated, have none.
        """
        return tuple(self.gpus[slot].uuid or str(slot) for slot in self.slots if slot < len(self.gpus))

    def files(self) -> dict[str, str]:
        """Returns the device files that a sandbox shows: the path on the machine, and that in the sandbox."""
        held = [f"nvidia{self.gpus[slot].minor}" for slot in self.slots if slot < len(self.gpus)]
        names = [*held, *_SHARED] if held else []
        if self.gpus:
            closed = self.closed()
            render = sorted((self.root / "dev" / "dri").glob("[cr]*[0-9]"))
            names += [f"dri/{path.name}" for path in render if _number(path) not in closed]
        else:
            names.append("dri")
        return {str(path): f"/dev/{name}" for name in names if (path := self.root / "dev" / name).exists()}

    def closed(self) -> set[tuple[int, int]]:
        """Returns major and minor number of the devices that the attempt may not open; empty: there are no GPUs."""
        if not self.gpus:
            return set()
        held = {self.gpus[slot].minor for slot in self.slots if slot < len(self.gpus)}
        found = {(_NVIDIA, minor) for minor in range(_MINORS) if minor not in held}
        for gpu in self.gpus:
            if gpu.minor not in held and gpu.pci:
                for file in (self.root / "sys/bus/pci/devices" / gpu.pci / "drm").glob("*/dev"):
                    major, minor = file.read_text().split(":")
                    found.add((int(major), int(minor)))
        return found


def close(cgroup: str | None, run_id: str, closed: Collection[tuple[int, int]]) -> str:
    """Forbids the processes that join a cgroup to open character devices with the numbers in `closed`.

    Args:
        cgroup: path of the task's cgroup v2; None: it has none.
        run_id: the task's `MIZZEN_RUN_ID`.
        closed: major and minor numbers.

    Returns:
        The path of the cgroup with the rules, which the task must join: `cgroup`, or a new one of cgroup v1.

    Raises:
        OSError: this process may not apply such rules, or the kernel supports neither kind.
    """
    if cgroup is not None:
        try:
            _attach(cgroup, closed)
            return cgroup
        except OSError:
            pass
    path = device_cgroup(run_id)
    try:
        for major, minor in sorted(closed):
            with open(f"{path}/devices.deny", "w") as file:
                file.write(f"c {major}:{minor} rwm")
    except OSError:
        remove_cgroup(path)
        raise
    return path


def _attach(cgroup: str, closed: Collection[tuple[int, int]]) -> None:
    minors: dict[int, list[int]] = {}
    for major, minor in sorted(closed):
        minors.setdefault(major, []).append(minor)
    folder = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    program = -1
    try:
        program = load(_refuses(minors), ProgramType.CGROUP_DEVICE, Hook.DEVICE, "mizzen_gpus")
        attach_to_cgroup(folder, {Hook.DEVICE: program})
    finally:
        for descriptor in (folder, program):
            if descriptor >= 0:
                os.close(descriptor)


def _refuses(minors: Mapping[int, Collection[int]]) -> Program:
    """Returns a program that refuses character devices with these minor numbers by major number."""
    program: Program = [
        Instruction(Op.CONSTANT, 0, constant=1),
        Instruction(Op.LOAD, 2, 1, offset=_TYPE),
        Instruction(Op.AND_CONSTANT, 2, constant=0xFFFF),
        Instruction(Op.JUMP_UNLESS_EQUAL_32, 2, constant=_CHARACTER, target="end"),
        Instruction(Op.LOAD, 2, 1, offset=_MAJOR),
        Instruction(Op.LOAD, 3, 1, offset=_MINOR),
    ]
    for major, numbers in minors.items():
        program.append(Instruction(Op.JUMP_UNLESS_EQUAL_32, 2, constant=major, target=f"not {major}"))
        program += [Instruction(Op.JUMP_IF_EQUAL_32, 3, constant=minor, target="refuse") for minor in numbers]
        program.append(f"not {major}")
    program += [Instruction(Op.JUMP, target="end"), "refuse", Instruction(Op.CONSTANT, 0, constant=0)]
    return [*program, "end", Instruction(Op.EXIT)]


def _number(path: Path) -> tuple[int, int]:
    device = path.stat().st_rdev
    return os.major(device), os.minor(device)
