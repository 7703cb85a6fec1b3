"""What a process gives back to the system of the memory that it has freed."""

import contextlib
import ctypes

_M_MMAP_THRESHOLD = -3
_THRESHOLD_BYTES = 128 << 10


def give_back_freed_memory() -> None:
    """Has glibc map every large block by itself, so that it goes back to the system when it is freed.

    By default glibc raises the size from which it does so whenever such a block is freed. A process whose columns grow
    by being copied then keeps the memory of many a former copy. Does nothing where the C library is another one.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)
