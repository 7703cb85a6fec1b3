"""Compiles the schedulers' inner loops before the stack starts, so that no request waits for the compiler."""

import asyncio
import os
import signal
from collections.abc import Callable

from domain.machine_code import is_complete
from infra import children
from infra.errors import StackError

_PACKAGES = ("gms", "rms")
_PRECOMPILE = "activities.scheduling.precompile"


async def compile_loops(say: Callable[[str], None], module: str = _PRECOMPILE) -> None:
    """Compiles the schedulers' inner loops if there is no compiled code of this version, and reports it with `say`.

    Raises:
        StackError: the compilation failed.
    """
    if all(map(is_complete, _PACKAGES)):
        return
    say("compiling the schedulers' inner loops (takes less than 30 s, once for each version)")
    process = await asyncio.create_subprocess_exec(
        *children.python("-m", module),
        env=children.environment(),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _, err = await process.communicate()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode:
        raise StackError(f"compiling the schedulers' inner loops failed:\n{err.decode(errors='replace')[-2000:]}")
