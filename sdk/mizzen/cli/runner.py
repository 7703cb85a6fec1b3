"""Runs the commands that need only the standard library, and returns their exit codes."""

import errno
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec

from mizzen.cli.exits import Exit
from mizzen.cli.parser import Parser
from mizzen.cli.printer import say
from mizzen.cli.values import Failure, UsageError

COMMANDS = {
    "cadence": "mizzen.cli.cadence:cadence",
    "checkpoint": "mizzen.cli.checkpoint:checkpoint",
}
"""The location (`module:name`) of the function that returns the parser of each command."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def load(target: str) -> Parser:
    """Return the parser of a command, given its value in `COMMANDS`."""
    module, _, attribute = target.partition(":")
    found = getattr(import_module(module), attribute)()
    assert isinstance(found, Parser)
    return found


def run(arguments: Sequence[str], commands: Mapping[str, str] = COMMANDS) -> int:
    """Run a command line that starts with a name in `commands`, and return its exit code. Errors go to stderr."""
    if arguments and arguments[0] in commands:
        return guarded(lambda: _run(arguments, commands[arguments[0]]))
    without = " and ".join(f"`mizzen {name}`" for name in commands)
    say(f"this command needs mizzen-client: pip install mizzen-client; {without} do not need it")
    return Exit.USAGE


def guarded(work: Callable[[], int]) -> int:
    """Call `work`, flush stdout, and return the exit code. An unexpected exception is printed to stderr."""
    _open_closed_streams()
    try:
        code = work()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return Exit.PIPE
    except OSError as error:
        if error.filename is None and error.errno not in _FULL:
            traceback.print_exc()
            return Exit.FAULT
        _discard_output()
        say(f"{error.filename or 'stdout or a file'}: {error.strerror}")
        return Exit.UNAVAILABLE
    except Exception:
        traceback.print_exc()
        return Exit.FAULT


def _open_closed_streams() -> None:
    """Replace standard streams that the caller has closed (`>&-`), which are None in Python, by the null device."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _discard_output() -> None:
    """Discard what stdout still buffers: the flush at exit must not write to a broken pipe or a full disk either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: Sequence[str], target: str) -> int:
    try:
        given = load(target).parse_args(arguments[1:])
        try:
            if given.output == "yaml" and find_spec("yaml") is None:
                raise UsageError("'-o yaml' needs pyyaml: pip install mizzen-client; '-o json' works without it")
            code: int = given.run(given)
            return code
        except UsageError as error:
            return int(given.parser.error(str(error)))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else Exit.OK
    except Failure as failure:
        say(str(failure))
        return failure.code
