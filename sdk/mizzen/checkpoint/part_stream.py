"""Reads a part piece by piece and verifies its checksum. Memory use does not depend on the size of the part."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, TypeAlias

from mizzen.checkpoint.errors import CorruptCheckpointError, MissingLibraryError
from mizzen.checkpoint.log import readable
from mizzen.checkpoint.manifest import Part
from mizzen.objects import checksums
from mizzen.objects.buffers import aligned
from mizzen.objects.store import Fetch, MissingObject, ObjectStore
from mizzen.objects.workers import Workers

Damage: TypeAlias = Literal["missing", "size", "checksum", "unreadable"]

_PIECE_BYTES = 8 << 20
_LOCAL_BYTES = 2 << 20
"""Size of a piece of a local file: it stays in the processor's cache between the read and the checksum."""
_AHEAD = 4
"""Pieces in memory: the caller uses one while the next ones are fetched."""


class DamagedPart(CorruptCheckpointError):
    """A part is missing, or differs from what was committed."""

    def __init__(self, what: Damage, message: str) -> None:
        super().__init__(message)
        self.what = what

    def __reduce__(self) -> tuple[type["DamagedPart"], tuple[Damage, str]]:
        """Distributed checkpoints send errors to all ranks."""
        return DamagedPart, (self.what, str(self))


def stream(store: ObjectStore, part: Part, *, ahead: bool = True) -> Iterator[memoryview]:
    """Yield the content of a part in pieces, in order. A piece is valid until the next one is requested.

    The checksum is compared after the last piece. Do not trust any piece before the iterator has ended. `ahead`: other
    threads fetch the next pieces meanwhile. To verify a local file, that costs more than it saves.

    Raises:
        DamagedPart: the part is missing, or differs from what was committed.
        MissingLibraryError: the checksum algorithm needs a library that is not installed.
        CheckpointError: the part cannot be read for another reason.
    """
    digest, expected = expected_digest(part)
    try:
        with readable(part.key):
            size_bytes = store.size(part.key)
            if size_bytes is None:
                raise DamagedPart("missing", f"{part.key} is missing")
            if size_bytes != part.size_bytes:
                message = f"{part.key} has {size_bytes:,} bytes instead of {part.size_bytes:,}"
                raise DamagedPart("size", message)
            if size_bytes:
                # The workers are stopped before the object is closed: they must not read from a closed file.
                piece_bytes = _LOCAL_BYTES if store.is_local else _PIECE_BYTES
                count = min(_AHEAD, -(-size_bytes // piece_bytes)) if ahead else 1
                with store.opened(part.key) as fetch, Workers(count) if ahead else nullcontext() as workers:
                    for piece in _pieces(fetch, workers, count, part, piece_bytes):
                        digest.update(piece)
                        yield piece
    except DamagedPart:
        raise
    except CorruptCheckpointError as error:
        # The part may have been removed after its size was read.
        what: Damage = "missing" if isinstance(error.__context__, MissingObject) else "unreadable"
        raise DamagedPart(what, str(error)) from error
    if digest.hexdigest() != expected:
        raise DamagedPart("checksum", f"{part.key} does not match its checksum {part.checksum}")


def expected_digest(part: Part) -> tuple[Any, str]:
    """Return a new digest object for a part, and the expected hexadecimal digest of its content.

    Raises:
        DamagedPart: the checksum algorithm is unknown.
        MissingLibraryError: the checksum algorithm needs a library that is not installed.
    """
    algorithm, _, expected = part.checksum.partition(":")
    try:
        return checksums.digest(algorithm), expected
    except checksums.UnknownAlgorithm as error:
        raise DamagedPart("checksum", f"{part.key}: {error}") from None
    except checksums.MissingAlgorithm as error:
        raise MissingLibraryError(f"{part.key}: {error}") from None


def _pieces(fetch: Fetch, workers: Workers | None, count: int, part: Part, piece_bytes: int) -> Iterator[memoryview]:
    starts = iter(range(0, part.size_bytes, piece_bytes))
    waiting: deque[tuple[memoryview, memoryview, Callable[[], int]]] = deque()

    def ask(memory: memoryview) -> None:
        start = next(starts, None)
        if start is not None:
            piece = memory[: part.size_bytes - start]
            done = partial(fetch, piece, start) if workers is None else workers.submit(fetch, piece, start).result
            waiting.append((memory, piece, done))

    for _ in range(count):
        ask(aligned(min(piece_bytes, part.size_bytes)))
    while waiting:
        memory, piece, done = waiting.popleft()
        if done() != len(piece):
            raise DamagedPart("size", f"{part.key} ends before its {part.size_bytes:,} bytes")
        yield piece
        ask(memory)
