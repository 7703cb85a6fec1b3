"""Reads YAML files that operators write, and writes private files."""

import os
import reprlib
from pathlib import Path
from typing import Any

import yaml

from infra.errors import ConfigurationError


class _Loader(yaml.SafeLoader):
    """The keys of mappings are strings, also `on`, which YAML 1.1 reads as a truth value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:bool":
                key.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """Returns the mapping in a YAML file; {} for an empty file. `what` is the kind of file for error messages.

    Raises:
        ConfigurationError: the file cannot be read, or does not contain a YAML mapping.
    """
    try:
        body = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigurationError(f"{what} {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        place = f"byte {error.object[error.start]:#04x} at position {error.start}"
        raise ConfigurationError(f"{what} {path}: is not text ({place} is not UTF-8); it must be YAML") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise ConfigurationError(f"{what} {path}: {place}{error.problem or 'is not YAML'}") from None
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{what} {path}: is not YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise ConfigurationError(f"{what} {path}: is nested too deeply") from None
    if body is None:
        return {}
    if not isinstance(body, dict):
        raise ConfigurationError(f"{what} {path}: must be a mapping of keys to values, it is {shown(body)}")
    return body


def shown(value: object) -> str:
    """Returns a value as text for error messages."""
    return "empty" if value is None else reprlib.repr(value)


def write_private(path: Path, content: str | bytes) -> None:
    """Writes a file that only its owner can read, atomically and synced to the disk."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def stamp(path: Path) -> tuple[int, int, int] | None:
    """Returns a value that changes when a file is written: inode, modification time and size; None: no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
