"""A worker of all roles that is killed and started again: a process that has imported everything forks it each time.

Reads lines of JSON: `run_s`, or null for as long as it takes to be told `stop`. Answers with the worker's exit status.
"""

import asyncio
import json
import os
import select
import signal
import sys
import traceback

from activities.roles import run_worker
from activities.scheduling.precompile import warm
from infra.config import Settings


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
