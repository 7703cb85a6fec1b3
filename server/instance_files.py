"""Reads instances and plans from files, and runs `mizzen tetris score`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from infra.errors import ConfigurationError
from server.outputs import STANDARD, write_json
from server.progress import compiling
from tetris import documents

if TYPE_CHECKING:
    from tetris.columns import Columns
    from tetris.pieces import RequiredPieces

T = TypeVar("T")


def run_score(instance_path: Path, plan_path: Path) -> int:
    """Runs `mizzen tetris score`; returns the exit code.

    Raises:
        ConfigurationError: a document is invalid, or both paths are standard input.
    """
    _check_two(instance_path, plan_path)
    columns = read_any(instance_path)
    plan = read_document(plan_path, lambda text: documents.read_plan(text, columns.table_names, columns.regions))
    with compiling():
        from tetris.problem import PlacementProblem

        found = PlacementProblem(columns, columns.homes_of(plan)).score()
    write_json(STANDARD, documents.score_document(found))
    return 0


def read_homes(instance_path: Path, plan_path: Path) -> dict[str, str]:
    """Returns the home region of every table of an instance if a plan is applied: table to region.

    Raises:
        ConfigurationError: a document is invalid, or both paths are standard input.
    """
    _check_two(instance_path, plan_path)
    instance = read_document(instance_path, documents.read_instance)
    plan = read_document(plan_path, lambda text: documents.read_plan(text, *documents.names_of(instance)))
    return {table.name: plan.get(table.name, table.home) for table in instance.tables}


def _check_two(instance_path: Path, plan_path: Path) -> None:
    if instance_path == plan_path == STANDARD:
        raise ConfigurationError("INSTANCE and PLAN are both standard input: give a file for one of them")


def read_document(path: Path, reader: Callable[[bytes], T]) -> T:
    """Parses a file, or standard input (`-`), with `reader`.

    Raises:
        ConfigurationError: the file cannot be read, or the document is invalid.
    """
    with _named("standard input" if path == STANDARD else path):
        return reader(sys.stdin.buffer.read() if path == STANDARD else documents.read_file(path))


@contextmanager
def _named(source: Path | str) -> Iterator[None]:
    """Context manager that names the source of a document in each line of its errors."""
    try:
        yield
    except documents.InstanceDocumentError as error:
        raise ConfigurationError(f"{source}: " + str(error).replace("\n", f"\nmizzen: {source}: ")) from None


def read_any(path: Path) -> "Columns":
    """Reads an instance from a JSON document or from a folder of Parquet files.

    Raises:
        ConfigurationError: a file cannot be read, or its content is invalid.
    """
    from tetris.columns import Columns

    if not path.is_dir():
        return Columns.of(read_document(path, documents.read_instance))
    from tetris.folders import read_folder

    with _named(path):
        return read_folder(path)


def read_needed(columns: "Columns", path: Path | None) -> "RequiredPieces":
    """Reads which partitions jobs need from the document at `path`; without a path, jobs need their whole tables.

    Raises:
        ConfigurationError: the document cannot be read, is invalid, or belongs to another instance.
    """
    from tetris.pieces import RequiredPieces

    if path is None:
        return RequiredPieces.of(columns)
    reads = read_document(path, documents.read_reads)
    try:
        return RequiredPieces.of(columns, reads)
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}") from None
