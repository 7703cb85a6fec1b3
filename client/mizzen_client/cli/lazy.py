"""A click group that imports a command when it runs, not when it is listed.

For a command of another distribution, the help line is read from the source file without importing it: server modules
take a second to import, and a module that cannot be imported must not break the list.
"""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "mizzen.commands"


class Lazy(NamedTuple):
    """A command of this package: its location in this folder (`module:name`), and its help line in the list."""

    target: str
    help: str


class LazyGroup(click.Group):
    """A group of the commands in `sections` and of the entry-point group `mizzen.commands`."""

    sections: Mapping[str, Mapping[str, Lazy]] = {}
    plugin_section = "Server"

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands in `sections`, in their order, then the names of the plugins."""
        return [*_own(self.sections), *(name for name in _plugins() if name not in _own(self.sections))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command, or return None if no command has this name.

        Raises:
            BrokenPlugin: the command of a plugin cannot be loaded.
        """
        if own := _own(self.sections).get(cmd_name):
            module, _, name = own.target.partition(":")
            command = getattr(import_module(f"mizzen_client.cli.{module}"), name)
            assert isinstance(command, click.Command)
            return command
        plugin = _plugins().get(cmd_name)
        return None if plugin is None else _load(plugin)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each section with its commands, without importing them."""
        sections = {title: {name: lazy.help for name, lazy in part.items()} for title, part in self.sections.items()}
        own = _own(self.sections)
        sections[self.plugin_section] = {name: _help_of(p) for name, p in _plugins().items() if name not in own}
        width = max(len(name) for part in sections.values() for name in part)
        for title, part in sections.items():
            if part:
                with formatter.section(title):
                    formatter.write_dl([(name.ljust(width), text) for name, text in part.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return completions: the command names that start with `incomplete`, and the options of the group."""
        own = [
            CompletionItem(name, help=lazy.help)
            for name, lazy in _own(self.sections).items()
            if name.startswith(incomplete)
        ]
        plugins = [CompletionItem(name) for name in _plugins() if name.startswith(incomplete)]
        return [*own, *plugins, *click.Command.shell_complete(self, ctx, incomplete)]


def _own(sections: Mapping[str, Mapping[str, Lazy]]) -> dict[str, Lazy]:
    return {name: lazy for part in sections.values() for name, lazy in part.items()}


@cache
def _plugins() -> "dict[str, EntryPoint]":
    # Imported here because it is slow to import and is not needed to run a command of this package.
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in sorted(entry_points(group=GROUP), key=lambda e: (e.name, e.value))}


class BrokenPlugin(click.ClickException):
    """The command of a plugin cannot be loaded."""

    exit_code = 70

    def __init__(self, plugin: "EntryPoint", problem: str) -> None:
        home = f" of {plugin.dist.name}" if plugin.dist else ""
        super().__init__(f"the command `{plugin.name}`{home} ({plugin.value}) {problem}")


def _load(plugin: "EntryPoint") -> click.Command:
    try:
        command = plugin.load()
    except Exception as error:  # A plugin's import may raise anything.
        raise BrokenPlugin(plugin, f"cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(command, click.Command):
        raise BrokenPlugin(plugin, f"is a {type(command).__name__}, not a click command")
    return command


def _help_of(plugin: "EntryPoint") -> str:
    """Return the first sentence of the docstring of the entry's function, or an empty string if it is not found."""
    import ast

    try:
        spec = find_spec(plugin.module)
        tree = ast.parse(Path(spec.origin).read_bytes()) if spec and spec.origin else ast.Module([], [])
    except Exception:  # The parent package may be broken in any way.
        return ""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == plugin.attr:
            return click.Command(plugin.name, help=ast.get_docstring(node)).get_short_help_str(limit=80)
    return ""
