"""Options that are declared as fields of a dataclass: flags, defaults, arguments, and dataclasses in dataclasses."""

from dataclasses import dataclass

import click
from click.testing import CliRunner

from server.options import argument, finite, included, option, takes


@dataclass(frozen=True)
class Inner:
    """Options that several commands have."""

    seed: int = option(default=3, help="The first seed.")
    json: str | None = option()


@dataclass(frozen=True)
class Outer:
    """The options of one command."""

    instance: str = argument()
    names: tuple[str, ...] = option("--policy", multiple=True)
    cold_start_s: float | None = option(type=float, callback=finite(above_zero=True))
    inner: Inner = included(Inner)
    fast: bool | None = option("--fast/--slow", default=None)


@click.command()
@takes(Outer)
def command(given: Outer) -> None:
    """Print the options."""
    click.echo(repr(given))


def _run(*arguments: str) -> str:
    return CliRunner().invoke(command, arguments).output


def test_a_command_receives_one_value() -> None:
    """Each field has the value of its option, or its default; a flag follows from its field's name."""
    assert _run("x") == f"{Outer('x', (), None, Inner(3, None), None)}\n"
    given = _run("x", "--policy", "a", "--policy", "b", "--cold-start-s", "2", "--seed", "7", "--json", "-", "--slow")
    assert given == f"{Outer('x', ('a', 'b'), 2.0, Inner(7, '-'), False)}\n"


def test_help_and_errors_are_those_of_click() -> None:
    """The order of help is that of the fields; the docstring of the command is its help."""
    said = _run("--help")
    flags = [word for word in said.split() if word.startswith("--") and word != "--help"]
    assert flags == ["--policy", "--cold-start-s", "--seed", "--json", "--fast", "--slow"]
    assert "Print the options." in said and "INSTANCE" in said and "The first seed." in said
    assert "'--cold-start-s': 0.0: must be a finite number above 0" in _run("x", "--cold-start-s", "0")
