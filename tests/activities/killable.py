"""A worker of all roles that is killed and started again: a process that has imported everything forks it each time.

Reads lines of JSON: `run_s`, or null for as long as it takes to be told `stop`. Answers with the worker's exit status.
One that gives up, as when Temporal dies while it starts, is started again, as its supervisor would.
The first line has its settings and regions; with `unreliable` its providers' answers go wrong by chance.
"""

import asyncio
import json
import os
import select
import signal
import sys
import time
import traceback
from functools import partial
from math import inf
from typing import Any

from activities import roles
from activities.roles import run_worker
from activities.scheduling.precompile import precompile
from infra.config import Settings
from tests.capacity.unreliable import unreliable_providers

GAVE_UP = 70
"""Exit status of a worker that ended with an exception, which is on standard error."""
PAUSE_S = 0.2


def main() -> None:
    """Forks workers, and kills them, as standard input says."""
    given = json.loads(sys.stdin.readline())
    settings = Settings.model_validate(given["settings"])
    precompile()
    print("ready", flush=True)
    while line := sys.stdin.readline():
        run_s = json.loads(line)["run_s"]
        ends_s = inf if run_s is None else time.monotonic() + run_s
        while (code := _run(settings, given, ends_s)) == GAVE_UP:
            time.sleep(PAUSE_S)
        if run_s is None:
            sys.stdin.readline()
        print(code, flush=True)


def _run(settings: Settings, given: dict[str, Any], ends_s: float) -> int:
    """A worker until it ends, or is killed at `ends_s` (monotonic) or for a line of input; its exit status."""
    pid = os.fork()
    if pid == 0:
        try:
            # What it was saying when it was killed must not run into the answer.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            if "unreliable" in given:
                roles.open_providers = partial(unreliable_providers, **given["unreliable"])
            asyncio.run(run_worker(settings, ["control", "region"], given["regions"]))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(GAVE_UP)
    ended = os.pidfd_open(pid)
    try:
        left_s = None if ends_s == inf else max(0.0, ends_s - time.monotonic())
        if ended not in select.select([sys.stdin, ended], [], [], left_s)[0]:
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(ended)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    main()
