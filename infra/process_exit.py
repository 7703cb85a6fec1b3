"""The signals that stop a process, and the exit of a process with native threads that Python cannot stop."""

import logging
import os
import signal
import sys
from typing import NoReturn


def end_process(code: int) -> NoReturn:
    """Flushes output and logs, then exits this process at once with `code`, without finalising the interpreter.

    Native threads of Temporal's SDK run to the end. A call of such a thread into an interpreter that is being finalised
    crashes the process, so that its exit status is a signal although its work was done. Python threads are not joined,
    because one may be blocked on a bucket or database that does not respond.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # A broken pipe or a closed stream.
            continue
    os._exit(code)


def stop_signals() -> list[signal.Signals]:
    """Returns the signals that stop a process gracefully: SIGTERM, SIGINT and SIGHUP.

    SIGHUP is sent when the terminal of the process is closed. A process started with `nohup` ignores SIGHUP, which is
    respected here.
    """
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if ignored else [signal.SIGHUP])]
