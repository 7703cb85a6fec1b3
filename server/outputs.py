"""Checks the output files of a command before its work starts, and writes documents atomically."""

import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from infra.errors import ConfigurationError

STANDARD = Path("-")
"""Stands for standard output, or standard input."""


def check_outputs(outputs: Mapping[str, Path | None], inputs: Mapping[str, Path]) -> None:
    """Checks that each output file can be written. Both mappings map names of options and arguments to paths.

    Raises:
        ConfigurationError: an output is a folder, cannot be written, is given twice, or is also an input.
    """
    known = {_identity(path): name for name, path in inputs.items() if path != STANDARD}
    for name, path in outputs.items():
        if path is None:
            continue
        if not _is_device(path):
            same = known.setdefault(_identity(path), name)
            if same != name:
                raise ConfigurationError(f"{name}: {_shown(path)}: is also {same}: give another file")
        if path != STANDARD:
            _check_writable(name, path)


def write_json(path: Path, body: Any, *, indent: int | None = 1) -> None:
    """Writes a JSON document to a file, or to standard output (`-`). An existing file is replaced atomically.

    With `indent` None the document is one line.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    write_text(path, json.dumps(body, indent=indent, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a text to a file, or to standard output (`-`). An existing file is replaced atomically.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    if path == STANDARD:
        _print(text)
        return
    try:
        if _is_device(path):
            path.write_text(text, encoding="utf-8")
            return
        with _beside(path) as (file, name):
            file.write(text)
            file.close()
            if path.exists():
                shutil.copymode(path, name)
            name.replace(path.resolve())
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}: the file was not changed") from None


def _print(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        # Otherwise flushing the rest of the buffer at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise ConfigurationError(f"standard output: {error.strerror}") from None


def _check_writable(name: str, path: Path) -> None:
    if path.is_dir():
        raise ConfigurationError(f"{name}: {path}: is a folder: give a file")
    if not path.resolve().parent.is_dir():
        raise ConfigurationError(f"{name}: {path}: folder {path.resolve().parent} does not exist")
    if path.exists() and not os.access(path, os.W_OK):
        raise ConfigurationError(f"{name}: {path}: no permission to write it")
    if not _is_device(path):
        try:
            with _beside(path):
                pass
        except OSError as error:
            raise ConfigurationError(f"{name}: {path}: cannot create a file in its folder: {error.strerror}") from None


@contextmanager
def _beside(path: Path) -> Iterator[tuple[IO[str], Path]]:
    """Context manager for a temporary file in the same folder as `path`; at the end it is deleted unless renamed."""
    target = path.resolve()
    name = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}")
    with name.open("x", encoding="utf-8") as file:
        try:
            yield file, name
        finally:
            name.unlink(missing_ok=True)


def _is_device(path: Path) -> bool:
    """Returns whether the path exists but is not a regular file, such as a terminal, a pipe or /dev/null."""
    return path != STANDARD and path.exists() and not path.is_file() and not path.is_dir()


def _identity(path: Path) -> Path:
    return path if path == STANDARD else path.resolve()


def _shown(path: Path) -> str:
    return "standard output" if path == STANDARD else str(path)
