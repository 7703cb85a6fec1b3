"""Encodes the parts of a state as file contents, and decodes them. Each part has one of four kinds:

| kind | value | file |
| --- | --- | --- |
| `bytes` | bytes, or a `pathlib.Path`: the content of that file | the bytes, unchanged |
| `json` | a tree without tensors or bytes | JSON (`mizzen.checkpoint.trees`) |
| `tensors` | a tree with numpy arrays, torch tensors or bytes | safetensors, with the tree in its metadata |
| `pickle` | `Pickled(value)` | pickle; loaded only if the reader trusts the store |

Saving never imports numpy or torch; loading imports them only if a file holds their objects. CPU tensors in
C order are not copied, and files are mapped, so a state of gigabytes is encoded in milliseconds. The chunks are
therefore live memory: they must be written or copied before the training continues.
"""

import mmap
import struct
from collections.abc import Callable, Sequence
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
"""The kind of parts that hold tensors."""


@dataclass(frozen=True)
class Pickled:
    """Wraps a value that only pickle can store. It loads as the unwrapped value.

    Loading a pickle can run any code, so it is loaded only with `trusted=True`.
    """

    value: Any


def file_name(name: str, kind: str) -> str:
    """Return the file name of the part `name`."""
    return f"part-{name}.{_EXTENSIONS[kind]}"


def encode(
    name: str,
    value: Any,
    walked: Callable[[trees.Flat], object] = lambda _: None,
    copied: Callable[[Sequence[Any]], memoryview] | None = None,
) -> tuple[str, list[Chunk]]:
    """Encode the part `name`; return its kind and its file content as chunks. Chunks may be views of live memory.

    `walked` is called with the flattened tree of a part of kind `tensors`. `copied`: see `tensorfile.pack`.

    Raises:
        StateError: the value holds something that cannot be stored, a file cannot be read, or pickling fails.
    """
    if isinstance(value, Pickled):
        import pickle

        try:
            return "pickle", [pickle.dumps(value.value, protocol=5)]
        except Exception as error:  # A class can raise any exception while it is pickled.
            raise StateError(f"part {name!r}: it cannot be pickled: {error}") from error
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
    return TENSORS, tensorfile.pack(metadata(flat.text, torch), flat.tensors, copied)


def metadata(tree: str, torch: bool) -> dict[str, str]:
    """Return the metadata of a file of kind `tensors`."""
    # Readers of other libraries expect `format`.
    return {"format": "pt" if torch else "np", _TREE: tree}


def check(name: str, value: Any) -> trees.Flat | None:
    """Check that the part `name` can be stored, without copying its content. Return its flattened tree, if it has one.

    Raises:
        StateError: see `encode`. Files are not checked, because they may be created later.
    """
    if isinstance(value, Pickled):
        encode(name, value)
    elif not isinstance(value, Path | bytes | bytearray | memoryview):
        return trees.flatten(name, value)
    return None


def decode(
    kind: str,
    content: bytearray | memoryview | tensorfile.Content,
    trusted: bool = False,
    *,
    name: str = "",
) -> Any:
    """Decode a part from its file content. Arrays and CPU tensors are writable views of the content.

    Args:
        kind: the kind that `encode` returned.
        content: the whole file, in writable memory. For `tensors` also the result of `fetching.fetch_tensors`.
        trusted: whether a pickle may be loaded. Loading a pickle can run any code.
        name: name of the part, for error messages.

    Raises:
        CorruptCheckpointError: the content cannot be decoded as `kind`.
        CheckpointError: it is a pickle that is not trusted or cannot be loaded. Or it holds arrays or tensors of a
            library that is not installed.
    """
    try:
        if kind == "tensors":
            metadata, tensors = content if isinstance(content, tuple) else tensorfile.unpack(content)
            return trees.restore(name, metadata[_TREE], tensors)
        assert not isinstance(content, tuple)
        if kind == "json":
            return trees.restore(name, bytes(content), {})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise CorruptCheckpointError(f"the content cannot be decoded as {kind}: {error!r}") from error
    if kind == "bytes":
        return bytes(content)
    if kind == "pickle":
        return _unpickled(content, trusted, name)
    raise CorruptCheckpointError(f"parts of the kind {kind!r} need a newer version of mizzen")


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
        raise CheckpointError(f"{message}; if you trust everyone who can write to the root, pass trusted=True")
    import pickle

    try:
        return pickle.loads(data)
    except Exception as error:
        # The checksum is right, so the code that the pickle needs is missing or wrong. An older checkpoint would fail
        # too, so this is not a CorruptCheckpointError.
        raise CheckpointError(f"part {name!r}: the pickle cannot be loaded: {error!r}") from error
