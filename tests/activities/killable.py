"""Runs a worker of all roles that tests kill and restart; each worker is forked from a process with all imports loaded.

Reads lines of JSON from standard input. `run_s` says after how many seconds the worker is killed; if it is null, the
worker runs until the next line of input. Prints the worker's exit status. A worker that exits with an exception, for
example because Temporal stopped during its start, is restarted, as its supervisor would do.

The first line holds the settings and the regions; with `unreliable`, the responses of its providers fail at random.
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
from infra.config.settings import Settings
from tests.capacity.unreliable import unreliable_providers

GAVE_UP = 70
"""Exit status of a worker that ended with an exception, which is on standard error."""
PAUSE_S = 0.2


def main() -> None:
    """Forks and kills workers as standard input says."""
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
    """Forks a worker, kills it at `ends_s` (monotonic) or at a line of input, and returns its exit status."""
    pid = os.fork()
    if pid == 0:
        try:
            # Output of a killed worker must not mix with the exit status that is printed here.
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
