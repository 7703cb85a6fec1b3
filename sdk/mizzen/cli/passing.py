"""Adds the commands of `mizzen.cli.plain` to the click application, for its lists, help and completion.

The commands are run by `mizzen.cli.plain.running`, which receives the unparsed arguments. click parses the arguments
only to complete a command line.
"""

from typing import Any

import click

from mizzen.cli.plain import running, spec
from mizzen.cli.session import Command, Commands, finish


class _Passing:
    """A mixin for click commands that passes the unparsed arguments to `mizzen.cli.plain.running`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See `click.Command.parse_args`."""
        if ctx.resilient_parsing:
            found: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
            return found
        ctx.meta[__name__] = [*args]
        return []

    def invoke(self, ctx: click.Context) -> Any:
        """See `click.Command.invoke`."""
        finish(running.run([*ctx.command_path.split()[1:], *ctx.meta[__name__]]))


class _PassingCommand(_Passing, Command):
    pass


class _PassingGroup(_Passing, Commands):
    pass


def passing(name: str) -> click.Command:
    """Return the click command for the command or group `name` of `mizzen.cli.plain.running.COMMANDS`."""
    found = running.load(name)
    if isinstance(found, spec.Command):
        return _command(found)
    return _PassingGroup(
        found.name, help=found.help, commands={inner.name: _command(inner) for inner in found.commands.values()}
    )


def _command(command: spec.Command) -> click.Command:
    options = [
        click.Option(
            [*option.flags, option.name],
            is_flag=option.is_flag,
            type=click.Choice(option.choices) if option.choices else None,
            metavar=option.metavar,
            help=option.help,
        )
        for option in command.options
    ]
    arguments = [click.Argument([argument.name], metavar=argument.metavar) for argument in command.arguments]
    return _PassingCommand(command.name, help=command.help, params=[*options, *arguments])


cadence = passing("cadence")
checkpoint = passing("checkpoint")
reclaim = passing("reclaim")
lend = passing("lend")
lending = passing("lending")
