"""Checksums of content: `xxh3_128` where the library xxhash is installed (ten times faster), else `sha256`.

They find damage, not tampering. A checksum says its algorithm, so that content can be judged wherever the algorithm is
there: `sha256:9f86d0...`.
"""

import hashlib
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from mizzen.objects.store import Chunk

_PIECE_BYTES = 16 << 20


class UnknownAlgorithm(ValueError):
    """A checksum's algorithm is none that any version knows."""


class MissingAlgorithm(ValueError):
    """A checksum's algorithm needs a library that is not installed."""


@cache
def _algorithms() -> dict[str, Callable[[], Any]]:
    known: dict[str, Callable[[], Any]] = {"sha256": hashlib.sha256}
    try:
        from xxhash import xxh3_128
    except ImportError:
        return known
    return {"xxh3_128": xxh3_128, **known}


def fastest() -> str:
    """The fastest algorithm that is there."""
    return next(iter(_algorithms()))


def known(algorithm: str) -> str:
    """`algorithm`, if it can be used here.

    Raises:
        ValueError: it cannot.
    """
    if algorithm not in _algorithms():
        hint = "; xxh3_128 needs mizzen[fast]" if algorithm == "xxh3_128" else ""
        raise ValueError(f"checksum={algorithm!r}: must be one of {', '.join(_algorithms())}{hint}")
    return algorithm


def digest(algorithm: str) -> Any:
    """A new digest, as `hashlib` makes them.

    Raises:
        UnknownAlgorithm: no version knows such an algorithm.
        MissingAlgorithm: its library is not installed.
    """
    if algorithm in _algorithms():
        return _algorithms()[algorithm]()
    if algorithm == "xxh3_128":
        raise MissingAlgorithm("xxh3_128 checksums: install mizzen[fast] to read what has them")
    raise UnknownAlgorithm(f"checksum {algorithm!r} is not known to this version")


def checksum(algorithm: str, chunks: Iterable[Chunk]) -> str:
    """The checksum of buffers one after the other."""
    found = digest(algorithm)
    for chunk in chunks:
        view = memoryview(chunk)
        for start in range(0, view.nbytes, _PIECE_BYTES):
            found.update(view[start : start + _PIECE_BYTES])
    return f"{algorithm}:{found.hexdigest()}"
