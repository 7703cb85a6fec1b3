"""A worker of all roles that is killed and started again: a process that has imported everything forks it each time.

Reads lines of JSON: `run_s`, or null for as long as it takes to be told `stop`. Answers with the worker's exit status.
The first line has its settings and regions; with `unreliable` its providers' answers go wrong by chance.
"""

import asyncio
import json
import os
import select
import signal
import sys
import traceback
from functools import partial

from activities import roles
from activities.roles import run_worker
from activities.scheduling.precompile import warm
from infra.config import Settings
from tests.capacity.unreliable import unreliable_providers


def main() -> None:
    """Forks workers, and kills them, as standard input says."""
    given = json.loads(sys.stdin.readline())
    settings = Settings.model_validate(given["settings"])
    warm()
    print("ready", flush=True)
    while line := sys.stdin.readline():
        run_s = json.loads(line)["run_s"]
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
                os._exit(0)
        select.select([sys.stdin], [], [], run_s)
        if run_s is None:
            sys.stdin.readline()
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
