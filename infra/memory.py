"""What a long-lived process does about its memory: what it gives back, and how often it looks for cycles."""

import contextlib
import ctypes
import gc
from collections.abc import Iterator

_M_MMAP_THRESHOLD = -3
_THRESHOLD_BYTES = 128 << 10
_YOUNG_OBJECTS = 10_000


def give_back_freed_memory() -> None:
    """Has glibc map every large block by itself, so that it goes back to the system when it is freed.

    By default glibc raises the size from which it does so whenever such a block is freed. A process whose columns grow
    by being copied then keeps the memory of many a former copy. Does nothing where the C library is another one.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Switches garbage collection off while libraries are imported in this context.

    They stay until the process ends, and collecting among them took up to a fifth of the CPU time of a start.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def collect_seldom() -> None:
    """Exempts all present objects from garbage collection, and has the youngest generation collected less often.

    A process that has loaded its libraries holds about a million objects that it will never free. Scanning them took a
    tenth of a worker's time. Call it once, when everything is loaded.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])
