"""NVIDIA's management library: the GPUs of this machine, their memory, use and errors.

The Python binding loads `libnvidia-ml.so.1`, which comes with the driver. The binding is imported only if the library
is there, because it takes half a second and 19 MB.
"""

import ctypes
import logging
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

_LIBRARY = "libnvidia-ml.so.1"
_MAKERS = {"nvidia", "tesla", "quadro", "geforce"}
_SIZE = re.compile(r"\d+gb|sxm\d*|pcie|hbm\d\w*|nvl|generation|laptop|gpu")
"""Words that begin the description of a variant in a product name."""
_lock = threading.Lock()
_libraries: dict[int, Any] = {}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine."""

    minor: int
    """The number of its device file, `/dev/nvidia<minor>`."""
    bus: tuple[int, ...] = ()
    """PCI domain, bus, device and function; empty: unknown."""
    uuid: str = ""
    name: str = ""
    memory_bytes: int = 0

    @property
    def pci(self) -> str:
        """Its PCI address as in `/sys/bus/pci/devices`; empty: unknown."""
        return "{:04x}:{:02x}:{:02x}.{:x}".format(*self.bus) if self.bus else ""

    @property
    def type(self) -> str:
        """Its type as documents name it: `a100` for `NVIDIA A100-SXM4-80GB`, `rtx4090` for `GeForce RTX 4090`."""
        words = [word for word in re.split(r"[^a-z0-9]+", self.name.lower()) if word and word not in _MAKERS]
        ends = next((place for place, word in enumerate(words) if place and _SIZE.fullmatch(word)), len(words))
        return "".join(words[:ends]) or "gpu"


_seen: dict[int, Gpu] = {}
"""The GPUs that this process has seen, by their NVML index."""


_offered: list[int] = []
T = TypeVar("T")


def offer_only(numbers: Sequence[int]) -> None:
    """Limits the GPUs of this agent to those with these numbers, in the order of the bus. GPU i of them is slot i."""
    _offered[:] = numbers


def offered(found: Sequence[T]) -> list[T]:
    """Returns the entries of the GPUs that this agent offers. `found` has an entry for each GPU of the machine."""
    return [found[number] for number in _offered if number < len(found)] if _offered else list(found)


@dataclass(frozen=True)
class Use:
    """The current use of a GPU."""

    used_bytes: int = 0
    """Memory that processes use, without what the driver keeps for itself."""
    pids: tuple[int, ...] = ()
    """Processes that have a context on it, other than this one."""
    percent: int = 0
    """Fraction of the last second (or a shorter time) in which it computed."""
    process_bytes: dict[int, int] = field(default_factory=dict)
    """Memory of each of the processes, as far as the driver says it."""


def devices() -> list[Gpu] | None:
    """Returns the GPUs that this process can open, in the order of the bus; None: NVML is missing, or fails."""
    library = _opened()
    if library is None:
        return None
    try:
        return offered([device for device, _ in _all(library)])
    except library.NVMLError as error:
        _log.warning("NVML fails, so files of the driver are read instead: %s", error)
        return None


def uses() -> list[Use] | None:
    """Returns the use of each of `devices()`; None: NVML is missing, or fails."""
    library = _opened()
    if library is None:
        return None
    try:
        return offered([Use() if handle is None else _use(library, handle) for _, handle in _all(library)])
    except library.NVMLError as error:
        _log.warning("NVML fails, so nvidia-smi is asked instead: %s", error)
        return None


class Xids:
    """Reads the Xid errors that the driver has reported since this was made."""

    def __init__(self) -> None:
        self._library = _opened()
        self._uuids: dict[int | None, str] = {}
        if self._library is None:
            return
        try:
            self._set = self._library.nvmlEventSetCreate()
            for gpu, handle in _all(self._library):
                wanted = self._library.nvmlEventTypeXidCriticalError
                if handle is not None:
                    _optional(self._library, partial(self._library.nvmlDeviceRegisterEvents, handle, wanted, self._set))
                    self._uuids[_address(handle)] = gpu.uuid
        except self._library.NVMLError as error:
            _log.warning("errors of GPUs cannot be detected: %s", error)
            self._library = None

    def read(self) -> list[tuple[str, int]]:
        """Returns the UUID of the GPU and the number of each error since the last call."""
        found: list[tuple[str, int]] = []
        while self._library is not None:
            try:
                event = self._library.nvmlEventSetWait(self._set, 0)
            except self._library.NVMLError as error:
                if error.value != self._library.NVML_ERROR_TIMEOUT:
                    _log.warning("errors of GPUs can no longer be detected: %s", error)
                    self._library = None
                break
            found.append((self._uuids.get(_address(event.device), ""), event.eventData))
        return found


def uncorrected_errors() -> dict[str, int]:
    """Returns the number of uncorrectable ECC errors of GPUs that count them, by UUID, since the driver started."""
    library = _opened()
    if library is None:
        return {}
    kind, since = library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, library.NVML_VOLATILE_ECC
    found = {}
    try:
        for gpu, handle in _all(library):
            if handle is not None:
                count = _optional(library, partial(library.nvmlDeviceGetTotalEccErrors, handle, kind, since))
                if count is not None:
                    found[gpu.uuid] = count
    except library.NVMLError as error:
        _log.warning("the memory errors of GPUs cannot be read: %s", error)
    return found


def _use(library: Any, handle: Any) -> Use:
    held: dict[int, int] = {}
    for get in (library.nvmlDeviceGetComputeRunningProcesses, library.nvmlDeviceGetGraphicsRunningProcesses):
        for process in _optional(library, partial(get, handle)) or ():
            if process.pid != os.getpid():
                held[process.pid] = max(held.get(process.pid, 0), process.usedGpuMemory or 0)
    rates = _optional(library, partial(library.nvmlDeviceGetUtilizationRates, handle))
    return Use(_memory(library, handle).used, tuple(sorted(held)), 0 if rates is None else rates.gpu, held)


def _memory(library: Any, handle: Any) -> Any:
    # The first version of the call counts what the driver reserves, up to a gigabyte, as used.
    newer = _optional(library, partial(library.nvmlDeviceGetMemoryInfo, handle, library.nvmlMemory_v2))
    return library.nvmlDeviceGetMemoryInfo(handle) if newer is None else newer


def _all(library: Any) -> list[tuple[Gpu, Any]]:
    """Returns the GPUs with their handles, in the order of the bus.

    A GPU that is lost after this process has seen it keeps its position, without a handle.
    """
    found = []
    for index in range(library.nvmlDeviceGetCount()):
        try:
            handle = library.nvmlDeviceGetHandleByIndex(index)
        except library.NVMLError as error:
            _log.warning("GPU %d of NVML cannot be used: %s", index, error)
            if index in _seen:
                found.append((_seen[index], None))
            continue
        pci = library.nvmlDeviceGetPciInfo(handle)
        device = Gpu(
            library.nvmlDeviceGetMinorNumber(handle),
            (pci.domain, pci.bus, pci.device, 0),
            _text(library.nvmlDeviceGetUUID(handle)),
            _text(library.nvmlDeviceGetName(handle)),
            _memory(library, handle).total,
        )
        _seen[index] = device
        found.append((device, handle))
    return sorted(found, key=lambda one: one[0].bus)


def _optional(library: Any, ask: Callable[[], Any]) -> Any:
    """Returns the answer, or None if this GPU or this driver cannot say it."""
    try:
        return ask()
    except library.NVMLError as error:
        if error.value in (library.NVML_ERROR_NOT_SUPPORTED, library.NVML_ERROR_FUNCTION_NOT_FOUND):
            return None
        raise


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _opened() -> Any:
    """Returns the binding with the library initialised in this process; None: there is no driver."""
    with _lock:
        pid = os.getpid()  # A forked process must initialise the library again.
        if pid not in _libraries:
            try:
                ctypes.CDLL(_LIBRARY)
            except OSError:
                return None
            import pynvml

            try:
                pynvml.nvmlInit()
            except pynvml.NVMLError as error:
                _log.info("NVML is not used: %s", error)
                return None
            _libraries[pid] = pynvml
        return _libraries[pid]
