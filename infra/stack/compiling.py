"""Compiling before the stack is up, so that nobody waits for a compiler in the middle of a request."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence

from domain.machine_code import is_complete
from infra.errors import StackError

_PACKAGES = ("gms", "rms")
_COMMAND = (sys.executable, "-m", "activities.scheduling.precompile")


async def compile_loops(say: Callable[[str], None], command: Sequence[str] = _COMMAND) -> None:
    """Compiles the schedulers' inner loops, with a word, if that was not done for this version of them.

    Raises:
        StackError: compiling failed.
    """
    if all(map(is_complete, _PACKAGES)):
        return
    say("compiling the schedulers' inner loops (under half a minute, once for each version of them)")
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, start_new_session=True
    )
    try:
        _, err = await process.communicate()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode:
        raise StackError(f"compiling the schedulers' inner loops failed:\n{err.decode(errors='replace')[-2000:]}")
