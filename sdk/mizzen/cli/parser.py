"""The parser of a command's arguments. Error messages name the option, its value and the valid values."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from mizzen.cli.exits import Exit
from mizzen.cli.values import FORMATS, finite

_OF_ONE = re.compile(r"argument (\S+): (.*)", re.DOTALL)
_CHOICE = re.compile(r"invalid choice: (.*) \(choose from (.*)\)", re.DOTALL)
_MISSING = re.compile(r"the following arguments are required: (.*)")
_UNKNOWN = re.compile(r"unrecognized arguments: (.*)", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """A parser with the shared options, once `runs` was called. Errors are reported like those of click."""

    def __init__(self, **settings: Any) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=form, allow_abbrev=False, **settings)

    def runs(self, command: Callable[[argparse.Namespace], int]) -> "Parser":
        """Add the options that every command has, and set the function of the command, which returns the exit code."""
        self.add_argument(
            "-o", "--output", choices=FORMATS, default="table", metavar="FORMAT",
            help="The output format: table, wide, json, yaml or name.",
        )  # fmt: skip
        ignored = "Accepted for consistency with other commands; ignored."
        number = finite("a number of seconds, 0 or more", above_zero=False)
        self.add_argument("--context", metavar="NAME", help=ignored)
        self.add_argument("--patience", type=number, default=30.0, metavar="SECONDS", help=ignored)
        self.set_defaults(run=command, parser=self)
        return self

    def commands(self) -> Callable[[str, str], "Parser"]:
        """Return a function that adds a command by its name and its description; its first paragraph is for lists."""

        def listed(_: argparse.Namespace) -> int:
            self.print_help(sys.stderr)
            return Exit.USAGE

        self.set_defaults(run=listed, parser=self, output="table")
        inner = self.add_subparsers(title="commands", dest="command", metavar="COMMAND")
        return lambda name, text: inner.add_parser(name, description=text, help=text.split("\n\n")[0])

    def error(self, message: str) -> NoReturn:
        """Print the message, reworded like the errors of click, and end the command."""
        form = " ".join(["[OPTIONS]", *(str(a.metavar) for a in self._actions if not a.option_strings)])
        usage = f"Usage: {self.prog} {form}\nTry '{self.prog} -h' for help."
        self.exit(Exit.USAGE, f"{usage}\n\nError: {_worded(message)}\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See `argparse.ArgumentParser.parse_known_args`; unknown arguments are an error of this command."""
        found, unknown = super().parse_known_args(self._joined(args), namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def _joined(self, arguments: Sequence[str]) -> list[str]:
        """Join each option and its value as `option=value`: argparse takes a separate value such as `-3h` for an
        option.
        """
        valued = {flag: action for action in self._actions if action.nargs != 0 for flag in action.option_strings}
        out: list[str] = []
        left = iter(arguments)
        for argument in left:
            if argument == "--":
                return [*out, argument, *left]
            option = valued.get(argument)
            value = next(left, None) if option else None
            out.append(argument if option is None or value is None else f"{option.option_strings[-1]}={value}")
        return out


def _worded(message: str) -> str:
    if found := _OF_ONE.fullmatch(message):
        choice = _CHOICE.fullmatch(found[2])
        if choice and found[1] == "COMMAND":
            return f"No such command {choice[1]}; the commands are {choice[2].replace(chr(39), '')}."
        name = " / ".join(f"'{flag}'" for flag in found[1].split("/"))
        if found[2].startswith("expected one argument"):
            return f"Option {name} requires an argument."
        return f"Invalid value for {name}: {f'{choice[1]} is not one of {choice[2]}' if choice else found[2]}"
    if found := _MISSING.fullmatch(message):
        names = found[1].split(", ")
        what = "option" if names[0].startswith("-") else "argument"
        return f"Missing {what} {', '.join(repr(name) for name in names)}."
    if found := _UNKNOWN.fullmatch(message):
        return f"No such option: {found[1]}" if found[1].startswith("-") else f"Unexpected arguments: {found[1]}"
    return message
