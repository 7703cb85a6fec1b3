"""Parts of a state as files: what kind a value is of, its file's content, and back.

| kind | value | file |
| --- | --- | --- |
| `bytes` | bytes, or a `pathlib.Path`: the content of that file | as it is |
| `json` | a tree without tensors and bytes in it | JSON (`mizzen.checkpoint.trees`) |
| `tensors` | a tree with numpy arrays, torch tensors or bytes in it | safetensors, the tree in its metadata |
| `pickle` | `Pickled(value)` | pickle; read only where the reader is told to trust it |

numpy and torch are never imported here to save, and to load only where a file has something of theirs. Tensors are
not copied where their memory has the file's form already (on the CPU, in C order), and files are mapped, so a state
of gigabytes is encoded in milliseconds. So its chunks are the live memory: whoever does not write them before the
training goes on copies them first.
"""

import mmap
import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mizzen.checkpoint import tensorfile, trees
from mizzen.checkpoint.errors import CheckpointError, CorruptCheckpointError, StateError
from mizzen.objects.store import Chunk

__all__ = ["Chunk", "Pickled", "check", "decode", "encode", "file_name"]

_EXTENSIONS = {"bytes": "bin", "json": "json", "tensors": "safetensors", "pickle": "pickle"}
_TREE = "mizzen.tree"
TENSORS = "tensors"
"""The kind of parts with tensors in them."""


@dataclass(frozen=True)
class Pickled:
    """A value that is stored by pickle, for what nothing else stores. It loads as the value itself.

    A pickle can run any code when it is loaded: only a reader who says that it trusts the store reads it.
    """

    value: Any


def file_name(name: str, kind: str) -> str:
    """The file of the part `name`."""
    return f"part-{name}.{_EXTENSIONS[kind]}"


def encode(name: str, value: Any, walked: Callable[[trees.Flat], object] = lambda _: None) -> tuple[str, list[Chunk]]:
    """The kind of the part `name` and its file's content, one chunk after the other. Chunks may be the live memory.

    `walked` is given the tree of a part of the kind `tensors`.

    Raises:
        StateError: the value, or something in it, is not stored; a file cannot be read; or pickle refuses it.
    """
    if isinstance(value, Pickled):
        try:
            return "pickle", [pickle.dumps(value.value, protocol=5)]
        except Exception as error:  # Classes raise what they like.
            raise StateError(f"part {name!r}: pickle refuses it: {error}") from error
    if isinstance(value, Path):
        return "bytes", _content(name, value)
    if isinstance(value, bytes | bytearray | memoryview):
        view = memoryview(value)
        return "bytes", [view.cast("B") if view.c_contiguous else view.tobytes()]
    flat = trees.flatten(name, value)
    if not flat.tensors:
        return "json", [flat.text.encode()]
    walked(flat)
    torch = any(tensor.library == "torch" for tensor in flat.tensors.values())
    return TENSORS, tensorfile.pack(metadata(flat.text, torch), flat.tensors)


def metadata(tree: str, torch: bool) -> dict[str, str]:
    """What a file of the kind `tensors` says besides its tensors."""
    # `format` is what readers of other libraries look for.
    return {"format": "pt" if torch else "np", _TREE: tree}


def check(name: str, value: Any) -> None:
    """Looks whether the part `name` could be stored, without a copy of anything in it.

    Raises:
        StateError: as `encode`. Files are not looked at: they may come later.
    """
    if isinstance(value, Pickled):
        encode(name, value)
    elif not isinstance(value, Path | bytes | bytearray | memoryview):
        trees.flatten(name, value)


def decode(
    kind: str,
    content: bytearray | memoryview | tensorfile.Content,
    trusted: bool = False,
    *,
    name: str = "",
    live: Mapping[str, Any] | None = None,
) -> Any:
    """The value of a part from its file's content. Arrays and tensors (on the CPU) are writable views of it.

    Args:
        kind: as `encode` gave it.
        content: all of the file. A view of a mapped or pinned region will do, if it is writable. Of `tensors` also what
            `fetching.fetch_tensors` gives.
        trusted: whether a pickle may be loaded, and so run whatever code it names.
        name: the part's, for errors.
        live: torch tensors whose memory is that of `content`: these come back.

    Raises:
        CorruptCheckpointError: it is not of that kind.
        CheckpointError: it is a pickle and not trusted, or cannot be loaded; or it holds arrays or tensors and their
            library is not installed.
    """
    try:
        if kind == "tensors":
            metadata, tensors = content if isinstance(content, tuple) else tensorfile.unpack(content)
            return trees.restore(name, metadata[_TREE], tensors, live)
        assert not isinstance(content, tuple)
        if kind == "json":
            return trees.restore(name, bytes(content), {})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise CorruptCheckpointError(f"its {kind} cannot be read: {error!r}") from error
    if kind == "bytes":
        return bytes(content)
    if kind == "pickle":
        return _unpickled(content, trusted, name)
    raise CorruptCheckpointError(f"its kind {kind!r} is not known to this version")


def _content(name: str, path: Path) -> list[Chunk]:
    try:
        with open(path, "rb") as file:
            # An empty file cannot be mapped.
            if not file.seek(0, 2):
                return []
            return [memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))]
    except (OSError, ValueError) as error:
        raise StateError(f"part {name!r}: the file {path} cannot be read: {error}") from error


def _unpickled(data: bytearray | memoryview, trusted: bool, name: str) -> Any:
    if not trusted:
        message = f"part {name!r} is a pickle, which can run any code when it is loaded"
        raise CheckpointError(f"{message}; if you trust whoever may write there, pass Checkpointer(trusted=True)")
    try:
        return pickle.loads(data)
    except Exception as error:
        # Its checksum is right, so the code that it needs is not: an older checkpoint would fail in the same way.
        raise CheckpointError(f"part {name!r}: its pickle cannot be loaded: {error!r}") from error
