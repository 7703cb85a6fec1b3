"""Ending a process that has native threads, which Python cannot stop."""

import logging
import os
import sys
from typing import NoReturn


def end_process(code: int) -> NoReturn:
    """Ends this process at once with `code`, after all that it printed and logged is written.

    The interpreter is not torn down. Threads of Temporal's SDK go on to the last instant, and one that calls into an
    interpreter which is being torn down crashes the process after all its work was done, and with a signal for an exit
    status. Python's own threads are not joined either: one may wait for a bucket or a database that does not answer.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # A broken pipe, or the stream is closed.
            continue
    os._exit(code)
