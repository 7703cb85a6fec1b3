"""Checksums of content: `xxh3_128` if the library xxhash is installed (ten times faster), else `sha256`.

They detect accidental damage, not tampering. A checksum includes its algorithm, as in `sha256:9f86d0...`, so that it
can be verified on any machine that has the algorithm.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from mizzen.objects.store import Chunk

_PIECE_BYTES = 16 << 20


class UnknownAlgorithm(ValueError):
    """The algorithm of a checksum is unknown."""


class MissingAlgorithm(ValueError):
    """The algorithm of a checksum needs a library that is not installed."""


@cache
def _algorithms() -> dict[str, Callable[[], Any]]:
    import hashlib  # Not at the start: it loads OpenSSL, which takes some ms of CPU.

    known: dict[str, Callable[[], Any]] = {"sha256": hashlib.sha256}
    try:
        from xxhash import xxh3_128
    except ImportError:
        return known
    return {"xxh3_128": xxh3_128, **known}


def fastest() -> str:
    """Return the name of the fastest installed algorithm."""
    return next(iter(_algorithms()))


def known(algorithm: str) -> str:
    """Check that an algorithm is installed, and return its name.

    Raises:
        ValueError: the algorithm is unknown or not installed.
    """
    if algorithm not in _algorithms():
        hint = "; xxh3_128 needs mizzen[fast]" if algorithm == "xxh3_128" else ""
        raise ValueError(f"checksum={algorithm!r}: must be one of {', '.join(_algorithms())}{hint}")
    return algorithm


def digest(algorithm: str) -> Any:
    """Return a new digest object with the interface of `hashlib`.

    Raises:
        UnknownAlgorithm: the algorithm is unknown.
        MissingAlgorithm: the library of the algorithm is not installed.
    """
    if algorithm in _algorithms():
        return _algorithms()[algorithm]()
    if algorithm == "xxh3_128":
        raise MissingAlgorithm("xxh3_128 checksums need the library xxhash: install mizzen[fast]")
    raise UnknownAlgorithm(f"checksums by {algorithm!r} need a newer version of mizzen")


def checksum(algorithm: str, chunks: Iterable[Chunk]) -> str:
    """Return the checksum (`algorithm:hex`) of the concatenated buffers."""
    found = digest(algorithm)
    for chunk in chunks:
        view = memoryview(chunk)
        for start in range(0, view.nbytes, _PIECE_BYTES):
            found.update(view[start : start + _PIECE_BYTES])
    return f"{algorithm}:{found.hexdigest()}"
