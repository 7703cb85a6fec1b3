"""Waiting for the ends of processes, which need not be children, by the kernel's word."""

import asyncio
import contextlib
import os
from collections.abc import Iterable

_LOOK_S = 0.1
"""How long a wait lasts at most where the kernel does not tell."""


async def first_end(pids: Iterable[int], timeout_s: float | None = None) -> None:
    """Returns when one of the processes has ended, or after `timeout_s`; the caller looks which, and may ask again.

    A pid may have come to another process meanwhile, so there is no answer. Where pidfds are refused (an old kernel,
    a sandbox) it returns after a tenth of a second.
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
