"""Parses the arguments of a command with argparse. Error messages name the option, its value and the valid values."""

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from mizzen.cli.plain.spec import SHARED, BadValue, Command, Option, UsageError

_OF_ONE = re.compile(r"argument (\S+): (.*)", re.DOTALL)
_MISSING = re.compile(r"the following arguments are required: (.*)")
_UNKNOWN = re.compile(r"unrecognized arguments: (.*)", re.DOTALL)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise a `UsageError` with argparse's message, reworded like the errors of click."""
        raise UsageError(_worded(message))


def parser_of(command: Command, prog: str) -> argparse.ArgumentParser:
    """Return the argument parser of a command. `prog` is the name shown in its usage line."""
    parser = _Parser(
        prog=prog,
        description=_escaped(command.help),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for argument in command.arguments:
        parser.add_argument(argument.name, metavar=argument.metavar, help=_escaped(argument.help))
    for option in (*command.options, *SHARED):
        if option.is_flag:
            parser.add_argument(*option.flags, dest=option.name, action="store_true", help=_escaped(option.help))
        else:
            parser.add_argument(
                *option.flags,
                dest=option.name,
                type=_typed(option),
                metavar=option.metavar,
                default=option.default,
                required=option.required,
                help=_escaped(option.help),
            )
    return parser


def parse(command: Command, prog: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments into the values of a command's options and arguments.

    Raises:
        UsageError: an argument is invalid or missing.
        SystemExit: the arguments ask for help, which has been printed.
    """
    return parser_of(command, prog).parse_args(_joined(command, arguments))


def _joined(command: Command, arguments: Sequence[str]) -> list[str]:
    """Join each option and its value as `option=value`: argparse takes a separate value such as `-3h` for an option."""
    valued = {flag: option for option in (*command.options, *SHARED) if not option.is_flag for flag in option.flags}
    out: list[str] = []
    left = iter(arguments)
    for argument in left:
        if argument == "--":
            return [*out, argument, *left]
        option = valued.get(argument)
        value = next(left, None) if option else None
        out.append(argument if option is None or value is None else f"{option.flags[-1]}={value}")
    return out


def _typed(option: Option) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return option.read(text)
        except BadValue as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _worded(message: str) -> str:
    if found := _OF_ONE.fullmatch(message):
        name = " / ".join(f"'{flag}'" for flag in found[1].split("/"))
        if found[2].startswith("expected one argument"):
            return f"Option {name} requires an argument."
        return f"Invalid value for {name}: {found[2]}"
    if found := _MISSING.fullmatch(message):
        names = found[1].split(", ")
        what = "option" if names[0].startswith("-") else "argument"
        return f"Missing {what} {', '.join(repr(name) for name in names)}."
    if found := _UNKNOWN.fullmatch(message):
        return f"No such option: {found[1]}" if found[1].startswith("-") else f"Unexpected arguments: {found[1]}"
    return message


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
