"""Generates an instance of a given size, as a JSON document or a folder: `python -m research.tetris --help`."""

from pathlib import Path

import click

from infra.errors import ConfigurationError
from server.commands import run_command
from server.outputs import STANDARD, check_outputs, write_json
from server.progress import starting
from server.tetris_commands import Output


def run_generate(tables: int, regions: int, seed: int, out: Path) -> int:
    """Writes an instance; returns the exit code.

    If `out` ends in `.json` or is `-`, a JSON document is written, otherwise a folder.

    Raises:
        ConfigurationError: `out` cannot be written.
    """
    is_document = out == STANDARD or out.suffix == ".json"
    with starting():
        if is_document:
            check_outputs({"--out": out}, {})
        elif out.exists() and not out.is_dir():
            raise ConfigurationError(f"--out: {out}: is a file: give a folder, or a name that ends in .json")
        elif not out.resolve().parent.is_dir():
            raise ConfigurationError(f"--out: {out}: folder {out.resolve().parent} does not exist")
        from research.tetris.generate import generate
        from research.tetris.instances import to_instance
        from tetris.documents import instance_document
        from tetris.folders import write_folder

        columns = generate(tables, regions, seed)
    if is_document:
        write_json(out, instance_document(to_instance(columns)))
        return 0
    try:
        write_folder(columns, out)
    except OSError as error:
        raise ConfigurationError(f"--out: {out}: {error.strerror}") from None
    return 0


@click.command()
@click.option("--tables", type=click.IntRange(min=1), default=200, show_default=True)
@click.option(
    "--regions", type=click.IntRange(min=3), default=6, show_default=True, help="Hardware is distributed unevenly."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--out",
    type=Output(may_be_folder=True),
    default=Path("-"),
    help="A file whose name ends in .json, or a folder for Parquet files.",
)
def generate(tables: int, regions: int, seed: int, out: Path) -> None:
    """Generate an instance with the distributions that MAST reports."""
    run_command(lambda: run_generate(tables, regions, seed, out))


if __name__ == "__main__":
    generate()
