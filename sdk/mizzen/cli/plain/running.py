"""Runs the commands that need only the standard library, and returns their exit codes."""

import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from mizzen.cli.exits import Exit
from mizzen.cli.plain.parser import parse
from mizzen.cli.plain.printing import say
from mizzen.cli.plain.spec import Command, Failure, Group, UsageError

COMMANDS = {
    "cadence": "mizzen.cli.plain.cadence:CADENCE",
    "checkpoint": "mizzen.cli.plain.checkpoint:CHECKPOINT",
    "reclaim": "mizzen.cli.plain.owner:RECLAIM",
    "lend": "mizzen.cli.plain.owner:LEND",
    "lending": "mizzen.cli.plain.owner:LENDING",
}
"""The location (`module:name`) of each command."""

_HELP = ("-h", "--help")


def load(name: str) -> Command | Group:
    """Import and return the command or group `name` of `COMMANDS`."""
    module, _, attribute = COMMANDS[name].partition(":")
    found = getattr(import_module(module), attribute)
    assert isinstance(found, Command | Group)
    return found


def run(arguments: Sequence[str]) -> int:
    """Run a command line that starts with a name of `COMMANDS`, and return its exit code. Errors go to stderr."""
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except Failure as failure:
        say(str(failure))
        return failure.code
    except BrokenPipeError:
        # The flush at exit must not write to the broken pipe either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.PIPE
    except Exception:
        traceback.print_exc()
        return Exit.FAULT


def _run(arguments: Sequence[str]) -> int:
    name, *rest = arguments
    prog, command = f"mizzen {name}", load(name)
    if isinstance(command, Group):
        if not rest or rest[0] in _HELP:
            print(_list(command, prog), file=sys.stdout if rest else sys.stderr)
            return Exit.OK if rest else Exit.USAGE
        inner = command.commands.get(rest[0])
        if inner is None:
            return _refuse(
                prog, "COMMAND", f"No such command {rest[0]!r}; the commands are {', '.join(command.commands)}."
            )
        prog, command, rest = f"{prog} {rest[0]}", inner, rest[1:]
    try:
        values = parse(command, prog, rest)
        if values.output == "yaml" and find_spec("yaml") is None:
            raise UsageError("'-o yaml' needs pyyaml: pip install 'mizzen[client]'; '-o json' works without it")
        return command.run(values)
    except UsageError as error:
        return _refuse(prog, " ".join(["[OPTIONS]", *(one.metavar for one in command.arguments)]), str(error))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else Exit.OK


def _refuse(prog: str, form: str, message: str) -> int:
    print(f"Usage: {prog} {form}\nTry '{prog} -h' for help.\n\nError: {message}", file=sys.stderr)
    return Exit.USAGE


def _list(group: Group, prog: str) -> str:
    width = max(len(name) for name in group.commands)
    lines = [f"  {name.ljust(width)}  {first_sentence(command.help)}" for name, command in group.commands.items()]
    return "\n".join([f"usage: {prog} COMMAND [OPTIONS]", "", group.help, "", "commands:", *lines])


def first_sentence(text: str) -> str:
    """Return the first paragraph of a command's help as one line."""
    return text.split("\n\n")[0].replace("\n", " ")
