"""Waits for the end of processes with pidfds. The processes need not be children of this one."""

import asyncio
import contextlib
import os
from collections.abc import Iterable

_LOOK_S = 0.1
"""Maximum duration of a wait if the kernel does not support pidfds."""


async def first_end(pids: Iterable[int], timeout_s: float | None = None) -> None:
    """Waits until one of the processes has ended, or for `timeout_s`. The caller must check which process has ended.

    Returns nothing, because a pid may have been reused by another process. If pidfds are not available (an old kernel,
    a sandbox), it returns after at most 0.1 s.
    """
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    with contextlib.ExitStack() as opened:
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                return
            except OSError:
                timeout_s = _LOOK_S if timeout_s is None else min(timeout_s, _LOOK_S)
                continue
            opened.callback(os.close, descriptor)
            loop.add_reader(descriptor, ended.set)
            opened.callback(loop.remove_reader, descriptor)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await ended.wait()
