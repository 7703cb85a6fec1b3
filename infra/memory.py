"""Memory settings of long-lived processes: returning freed memory to the system, and garbage collection."""

import contextlib
import ctypes
import gc
from collections.abc import Iterator

_M_MMAP_THRESHOLD = -3
_THRESHOLD_BYTES = 128 << 10
_YOUNG_OBJECTS = 10_000


def give_back_freed_memory() -> None:
    """Makes glibc allocate each block from 128 KiB with mmap, so that freed blocks return to the system.

    By default glibc raises this threshold whenever such a block is freed. A process whose arrays grow by copying then
    keeps the memory of many old copies. Does nothing with other C libraries.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Disables garbage collection in the context, for importing libraries.

    Imported objects live until the process ends, and garbage collection took up to a fifth of the CPU time of a start.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def collect_seldom() -> None:
    """Excludes all existing objects from garbage collection, and makes collections of the youngest generation rarer.

    After importing its libraries a process has about a million objects that it never frees. Scanning them took a tenth
    of a worker's time. Call this once, after everything is loaded.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])
