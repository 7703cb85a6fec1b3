"""The end of a process that has threads which Python does not know."""

import logging
import os
import sys
from typing import NoReturn


def end_process(code: int) -> NoReturn:
    """Ends this process at once with `code`, after all that it printed and logged is written.

    The interpreter is not torn down. Threads of Temporal's SDK go on to the last instant, and one that calls into an
    interpreter which is being torn down crashes the process after all its work was done, and with a signal for an exit
    status. Nor is a thread waited for that waits for a bucket or a database which does not answer.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # Nobody reads it any more, or it is closed.
            continue
    os._exit(code)
