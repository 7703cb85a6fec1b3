"""Reading workload documents: YAML or JSON, several to a file (`---`).

Only the form is looked at here; what the keys mean is the API's business. A `workdir` that is not a checksum is a path
relative to the document's folder.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mizzen.client.errors import DocumentError

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Document:
    """A document and where it came from."""

    source: str
    """The file's name, with `#2` for its second document; for messages."""
    body: dict[str, Any]
    workdir: Path | None = None
    """The folder to pack, where the document names one; it is not in `body`."""


def read_documents(file: Path) -> list[Document]:
    """The documents of a file; at least one.

    Raises:
        DocumentError: it cannot be read, is no YAML or JSON, or a document is no mapping or has a key twice.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else not_text(error)
        raise DocumentError(f"{file}: {reason}") from None
    return parse_documents(text, str(file), file.parent)


def not_text(error: UnicodeDecodeError) -> str:
    """What is wrong with a file that is no text."""
    byte = error.object[error.start]
    return f"is not text: byte {byte:#04x} at position {error.start} is not UTF-8; a document is YAML or JSON"


def parse_documents(text: str, source: str, folder: Path) -> list[Document]:
    """The documents in `text`; `folder` is what their `workdir` is relative to.

    Raises:
        DocumentError: as for `read_documents`.
    """
    bodies = [body for body in _load(text, source) if body is not None]
    if not bodies:
        raise DocumentError(f"{source}: there is no document in it")
    documents = []
    for number, body in enumerate(bodies, 1):
        name = source if number == 1 else f"{source}#{number}"
        if not isinstance(body, dict):
            raise DocumentError(f"{name}: a document is a mapping of keys to values, this is a {type(body).__name__}")
        try:
            json.dumps(body, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise DocumentError(f"{name}: holds a value that JSON does not have: {error}") from None
        workdir = body.get("workdir")
        if isinstance(workdir, str) and not _SHA256.fullmatch(workdir):
            path = folder / Path(workdir).expanduser()
            documents.append(Document(name, {k: v for k, v in body.items() if k != "workdir"}, path))
        else:
            documents.append(Document(name, body))
    return documents


def _load(text: str, source: str) -> list[Any]:
    if text.lstrip().startswith("{"):
        # JSON may be indented with tabs, which YAML forbids. What is not JSON gets YAML's better message.
        try:
            return [json.loads(text, object_pairs_hook=_unique)]
        except _Twice as error:
            raise DocumentError(f"{source}: the key {error.args[0]!r} is given twice") from None
        except (ValueError, RecursionError):
            pass
    # PyYAML takes a moment to import, and JSON does not need it.
    from mizzen.client import yaml_core

    try:
        return yaml_core.load_all(text)
    except yaml_core.NotYaml as error:
        raise DocumentError(f"{source}{error}") from None


class _Twice(Exception):
    """A key that a mapping has twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise _Twice(key)
        out[key] = value
    return out
