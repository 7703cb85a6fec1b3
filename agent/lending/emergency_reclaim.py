"""Carries out `mizzen reclaim` while the agent does not answer.

    python -P -m agent.lending.emergency_reclaim STATE_DIR REQUEST

The request and the answers, lines of JSON on standard output, are those of the owner's socket
(`agent.lending.owner_socket`). Works from the records of the shims, which outlive the agent. The network of the machine
is left to the agent (`agent.network`).
"""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent.config import AgentConfig
from agent.lending.lender import BadRequest, Lender
from agent.lending.owner_request import FileWithoutAgent
from agent.locks import StartLocks
from agent.notices import MachineNotices
from agent.state import CONFIG, StateFolder

_PROGRESS_S = 1.0


async def reclaim(folder: Path, gpus: frozenset[int] | None, notice_s: float) -> None:
    """Takes GPUs of the machine back, or all of it (None), and prints the progress.

    Raises:
        BadRequest: the request is invalid.
        OSError, ValueError: the state folder has no configuration of an agent, or this user may not read it.
    """
    config = AgentConfig.model_validate_json((folder / CONFIG).read_bytes())
    notices = MachineNotices("sigterm", {})
    lender = Lender(config, StateFolder(folder), notices, StartLocks(), file=FileWithoutAgent(folder))
    reclaiming = asyncio.ensure_future(lender.reclaim(gpus, notice_s))
    while not reclaiming.done():
        await asyncio.wait({reclaiming}, timeout=_PROGRESS_S)
        if not reclaiming.done():
            _say({"status": await asyncio.to_thread(lender.status)})
    await reclaiming
    _say({"status": await asyncio.to_thread(lender.status)})


def main(arguments: Sequence[str]) -> None:
    """Runs the command."""
    folder, request = Path(arguments[0]), json.loads(arguments[1])
    gpus = request["gpus"]
    try:
        asyncio.run(reclaim(folder, None if gpus is None else frozenset(gpus), float(request["notice_s"])))
    except BadRequest as error:
        _say({"error": str(error)})
    except (OSError, ValueError) as error:
        _say({"error": f"the agent does not answer, and {folder} cannot be used without it: {error}"})
    else:
        _say({"done": True})


def _say(body: dict[str, Any]) -> None:
    try:
        print(json.dumps(body), flush=True)
    except BrokenPipeError:  # The command was ended with Ctrl-C; the reclaim continues.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main(sys.argv[1:])
