"""Reads workload documents: YAML or JSON, with several documents in a file (`---`).

Only the syntax is checked here; the API checks the keys and values. A `workdir` that is not a checksum is a path
relative to the document's folder.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mizzen_client.errors import DocumentError

_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST_BYTES = 16 << 20
"""Largest file of documents, so that a mistaken file, such as a checkpoint, does not fill the memory."""


@dataclass(frozen=True)
class Document:
    """A document and its source."""

    source: str
    """The name of the file, for messages. The second document of a file has the suffix `#2`."""
    body: dict[str, Any]
    workdir: Path | None = None
    """The folder to pack, if the document names one. It is then not part of `body`."""
    folder: Path = Path()
    """The folder to which paths in the document are relative."""


def read_documents(file: Path) -> list[Document]:
    """Read the documents of a file, at least one.

    Raises:
        DocumentError: the file cannot be read, is not YAML or JSON, or has no document; or a document is not a mapping
            or has a duplicate key.
    """
    try:
        with file.open("rb") as opened:
            data = opened.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise DocumentError(f"{file}: has more than {_MOST_BYTES >> 20} MiB; a document is YAML or JSON")
        text = data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else not_text(error)
        raise DocumentError(f"{file}: {reason}") from None
    return parse_documents(text, str(file), file.parent)


def not_text(error: UnicodeDecodeError) -> str:
    """Return a message about a file that is not UTF-8 text."""
    byte = error.object[error.start]
    return f"is not text: byte {byte:#04x} at position {error.start} is not UTF-8; a document is YAML or JSON"


def parse_documents(text: str, source: str, folder: Path) -> list[Document]:
    """Parse the documents in `text`. A relative `workdir` is resolved against `folder`.

    Raises:
        DocumentError: as for `read_documents`.
    """
    bodies = [body for body in _load(text, source) if body is not None]
    if not bodies:
        raise DocumentError(f"{source}: contains no document")
    documents = []
    for number, body in enumerate(bodies, 1):
        name = source if number == 1 else f"{source}#{number}"
        if not isinstance(body, dict):
            raise DocumentError(f"{name}: a document must be a mapping of keys to values, got a {type(body).__name__}")
        try:
            json.dumps(body, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise DocumentError(f"{name}: has a value that JSON cannot represent: {error}") from None
        documents.append(with_workdir(Document(name, body, folder=folder)))
    return documents


def with_workdir(document: Document) -> Document:
    """Return a document with the folder that its body names as `workdir`, relative to `folder`; else the same one.

    Raises:
        DocumentError: the folder is in the home of a user that does not exist.
    """
    workdir = document.body.get("workdir")
    if not isinstance(workdir, str) or _SHA256.fullmatch(workdir):
        return document
    try:
        path = document.folder / Path(workdir).expanduser()
    except RuntimeError as error:
        raise DocumentError(f"{document.source}: workdir: {workdir!r}: {error}") from None
    return replace(document, body={k: v for k, v in document.body.items() if k != "workdir"}, workdir=path)


def _load(text: str, source: str) -> list[Any]:
    if text.lstrip().startswith("{"):
        # JSON may be indented with tabs, which YAML forbids. If it is not JSON, YAML's error message is better.
        try:
            return [json.loads(text, object_pairs_hook=_unique)]
        except _Twice as error:
            raise DocumentError(f"{source}: duplicate key {error.args[0]!r}") from None
        except (ValueError, RecursionError):
            pass
    # Imported here because PyYAML is slow to import and JSON does not need it.
    from mizzen_client import yaml_core

    try:
        return yaml_core.load_all(text)
    except yaml_core.NotYaml as error:
        raise DocumentError(f"{source}{error}") from None


class _Twice(Exception):
    """A mapping has a duplicate key."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise _Twice(key)
        out[key] = value
    return out


def without_empty(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that have a value: no None, no empty mapping or list."""
    return {name: value for name, value in fields.items() if value is not None and value not in ({}, [])}
