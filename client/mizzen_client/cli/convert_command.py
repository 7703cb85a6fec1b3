"""`mizzen convert`: files of other schedulers become documents, with a remark for each line or option."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mizzen.cli.exits import Exit
from mizzen.cli.printer import say
from mizzen_client.cli import formats
from mizzen_client.cli.session import finish

if TYPE_CHECKING:
    from mizzen_client.convert.conversion import CannotConvert, Conversion


@click.command()
@click.argument("file", type=click.Path(allow_dash=True))
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the document to this file (default: stdout).",
)
@click.option(
    "--from",
    "kind",
    type=click.Choice(["slurm", "skypilot", "kubernetes", "submitit"]),
    help="The kind of FILE (default: recognised by its content).",
)
@click.option(
    "--report",
    type=click.Choice(["lines", "json"]),
    default="lines",
    show_default=True,
    help="Format of the report about each line on stderr.",
)
def convert(file: str, output: Path | None, kind: str | None, report: str) -> None:
    r"""Convert a file of another scheduler into a document.

    FILE is a batch script with #SBATCH lines, a SkyPilot task or service, a Kubernetes Job or JobSet, or a Python file
    that submits functions with submitit, which is not executed. `-` is stdin.

    \b
    On stderr, each line or option of FILE is reported as
      carried  with the same meaning,
      changed  with another meaning, which is explained,
      dropped  without an effect on the result, or
      lost     with an effect: the exit code is then 9, and the line says what to do.
    If no document can be written, the exit code is 2 and the message names the line.
    """
    from mizzen_client.convert import convert as conversion_of
    from mizzen_client.convert.conversion import CannotConvert
    from mizzen_client.convert.written import write_documents

    name = "stdin" if file == "-" else file
    try:
        found = conversion_of(_read(file), Path(name).name, kind)
        text = write_documents(found.documents)
        if output is not None:
            output.write_text(text, encoding="utf-8")
    except CannotConvert as error:
        _refuse(name, error, report)
        finish(Exit.USAGE)
    except OSError as error:
        say(f"{error.filename or name}: {error.strerror or error}")
        finish(Exit.USAGE)
    if output is None:
        click.echo(text, nl=False)
    _tell(name, found, report)
    finish(Exit.OK if found.is_complete else Exit.INCOMPLETE)


def _read(file: str) -> bytes:
    """Return the bytes of a file, at most one more than `convert` reads."""
    from mizzen_client.convert import MOST_BYTES

    if file == "-":
        return sys.stdin.buffer.read(MOST_BYTES + 1)
    with Path(file).open("rb") as stream:
        return stream.read(MOST_BYTES + 1)


def _tell(name: str, found: "Conversion", report: str) -> None:
    if report == "json":
        remarks = [
            {"line": one.line, "last_line": one.last_line or one.line, "outcome": one.outcome.value,
             "source": one.source, "target": one.target or None, "why": one.why or None}
            for one in found.remarks
        ]  # fmt: skip
        _print_json({"file": name, "kind": found.kind, "counts": found.counts, "remarks": remarks})
        return
    for remark in found.remarks:
        click.echo(formats.visible(f"{name}:{remark}"), err=True)
    counts = ", ".join(f"{number} {outcome}" for outcome, number in found.counts.items())
    click.echo(formats.visible(f"{name}: {counts}"), err=True)


def _refuse(name: str, error: "CannotConvert", report: str) -> None:
    if report == "json":
        _print_json({"file": name, "refused": {"line": error.line, "why": error.reason}})
    else:
        click.echo(formats.visible(f"{name}:{error}"), err=True)


def _print_json(body: object) -> None:
    click.echo(json.dumps(body, indent=2), err=True)
