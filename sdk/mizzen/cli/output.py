"""Prints data in the output format of a session, by means of `mizzen.cli.plain.printer`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import click

from mizzen.cli.plain import printer
from mizzen.cli.plain.printer import Column, cell, dump, dump_line, measure, table
from mizzen.cli.session import Session

__all__ = ["Column", "cell", "dump", "dump_line", "emit_list", "emit_one", "emit_stream", "measure", "table"]


def emit_list(
    session: Session,
    items: Sequence[Any],
    columns: Sequence[Column],
    name: Callable[[Any], str] = lambda item: str(item["id"]),
) -> None:
    """Print a list of items in the session's output format. `name` returns the text that `-o name` prints."""
    printer.emit_list(session.output, items, columns, name)


def emit_one(session: Session, item: Mapping[str, Any], page: Callable[[], str], name: str | None = None) -> None:
    """Print one item: `page` for the formats table and wide, `name` (default: the item's id) for the format name."""
    printer.emit_one(session.output, item, page, name)


def emit_stream(session: Session, items: Iterable[Any], line: Callable[[Any], str], name: Callable[[Any], str]) -> None:
    """Print items as they arrive."""
    for item in items:
        if session.output == "json":
            click.echo(dump_line(item))
        elif session.output == "yaml":
            click.echo("---\n" + dump(item, "yaml"))
        else:
            click.echo(cell(name(item) if session.output == "name" else line(item)))
