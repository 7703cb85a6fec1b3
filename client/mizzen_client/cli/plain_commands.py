"""Adds the commands of `start.COMMANDS` to the click application, for its lists, help and completion.

The commands are run by `mizzen.cli.runner`, which receives the unparsed arguments. click parses the arguments
only to complete a command line.
"""

import argparse
from typing import Any

import click

from mizzen.cli import runner
from mizzen_client.cli.session import Commands, OutputCommand, finish
from mizzen_client.cli.start import COMMANDS


class _Passing:
    """A mixin for click commands that passes the unparsed arguments to `mizzen.cli.runner`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See `click.Command.parse_args`."""
        if ctx.resilient_parsing:
            found: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
            return found
        ctx.meta[__name__] = [*args]
        return []

    def invoke(self, ctx: click.Context) -> Any:
        """See `click.Command.invoke`."""
        finish(runner.run([*ctx.command_path.split()[1:], *ctx.meta[__name__]], COMMANDS))


class _PassingCommand(_Passing, OutputCommand):
    pass


class _PassingGroup(_Passing, Commands):
    pass


def passing(name: str, parser: argparse.ArgumentParser | None = None) -> click.Command:
    """Return the click command for a parser, which is by default that of `start.COMMANDS`."""
    parser = parser or runner.load(COMMANDS[name])
    actions = parser._actions
    for action in actions:
        if isinstance(action, argparse._SubParsersAction):
            commands = {inner: passing(inner, of) for inner, of in action.choices.items()}
            return _PassingGroup(name, help=parser.description, commands=commands)
    shared = {option.name for option in _PassingCommand(name).params} | {"help"}
    params = [_parameter(action) for action in actions if action.dest not in shared]
    return _PassingCommand(name, help=parser.description, params=params)


def _parameter(action: argparse.Action) -> click.Parameter:
    if not action.option_strings:
        return click.Argument([action.dest], metavar=str(action.metavar))
    kind = click.Choice(list(action.choices)) if action.choices else None
    names, is_flag = [*action.option_strings, action.dest], action.nargs == 0
    metavar = None if is_flag else str(action.metavar)
    return click.Option(names, is_flag=is_flag, type=kind, metavar=metavar, help=action.help)


cadence = passing("cadence")
checkpoint = passing("checkpoint")
reclaim = passing("reclaim")
lend = passing("lend")
lending = passing("lending")
