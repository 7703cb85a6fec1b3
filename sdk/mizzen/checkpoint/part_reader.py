"""Reads parts and verifies their checksums in the same pass: each piece is checked while the next ones are fetched.

Tensors are read directly into their final memory: new memory in which each tensor begins at a multiple of 64 bytes, as
in torch (kernels round differently at other addresses), or the tensors of a live model, once the part was verified. In
addition, only a few pieces are held in memory.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from struct import error as StructError
from typing import TYPE_CHECKING, Any, NamedTuple

from mizzen.checkpoint import tensorfile
from mizzen.checkpoint.errors import CorruptCheckpointError
from mizzen.checkpoint.log import readable
from mizzen.checkpoint.manifest import Part
from mizzen.checkpoint.part_stream import expected_digest, stream
from mizzen.objects.buffers import aligned, padded
from mizzen.objects.store import Fetch, ObjectStore
from mizzen.objects.workers import Workers

if TYPE_CHECKING:
    from concurrent.futures import Future

_PIECE_BYTES = 8 << 20
_STAGED_BYTES = 2 << 20
"""Maximum size of a piece that holds several small tensors and is copied from a buffer."""
_DIRECT_BYTES = 256 << 10
"""A tensor of at least this size is read directly into its memory; smaller tensors are read together."""
_FETCHES = 4
"""Pieces that are fetched concurrently."""
_AHEAD = 2 * _FETCHES
_HEAD_BYTES = 64 << 10


class _Piece(NamedTuple):
    """A range of a part, and the buffers that its bytes fill, in order."""

    start: int
    size_bytes: int
    into: Sequence[memoryview]


def fetch_part(store: ObjectStore, part: Part) -> memoryview:
    """Read a part into a writable buffer, and verify its size and checksum.

    Raises:
        CorruptCheckpointError: the part is missing, or differs from what was committed.
        CheckpointError: the part cannot be read for another reason.
    """
    content = aligned(part.size_bytes)
    with _reading(store, part) as reading:
        reading.read(
            _Piece(start, len(view), (view,))
            for start in range(0, part.size_bytes, _PIECE_BYTES)
            for view in [content[start : start + _PIECE_BYTES]]
        )
    return content


def verify_part(store: ObjectStore, part: Part) -> None:
    """Read a part and verify its size and checksum, without keeping its content. Raises as `fetch_part`."""
    for _ in stream(store, part, ahead=not store.is_local):
        pass


def fetch_tensors(store: ObjectStore, part: Part) -> tensorfile.Content:
    """Read the metadata and the tensors of a part of kind `tensors`.

    Raises:
        CorruptCheckpointError: the part is missing, differs from what was committed, or is not a safetensors file.
        CheckpointError: the part cannot be read for another reason.
    """
    with _reading(store, part) as reading:
        try:
            start, metadata, entries = reading.header()
        except (ValueError, KeyError, TypeError, AttributeError, StructError) as error:
            verify_part(store, part)  # If the file is damaged, this raises the more exact checksum error.
            raise CorruptCheckpointError(f"{part.key}: the tensors cannot be read: {error!r}") from error
        memory, used = aligned(sum(padded(entry.size_bytes) for entry in entries)), 0
        tensors: tensorfile.Tensors = {}
        places: list[memoryview] = []
        for entry in entries:
            view = memory[used : used + entry.size_bytes]
            used += padded(entry.size_bytes)
            tensors[entry.name] = (entry.dtype, entry.shape, view)
            places.append(view)
        reading.read(_scattered(start, places))
    return metadata, tensors


def read_into(store: ObjectStore, part: Part, start: int, places: Sequence[memoryview]) -> None:
    """Read a part from offset `start` to its end into `places`, in order. If this raises, they are partly overwritten.

    Raises as `fetch_part`.
    """
    with _reading(store, part) as reading:
        reading.skip(start)
        reading.read(_scattered(start, places))


def begins_with(store: ObjectStore, part: Part, head: bytes) -> bool:
    """Return whether the content of a part begins with `head`. It is not verified.

    Raises:
        CorruptCheckpointError: the part is missing.
        CheckpointError: the part cannot be read for another reason.
    """
    with readable(part.key):
        return store.get_range(part.key, 0, len(head)) == head


def _scattered(start: int, places: Iterable[memoryview]) -> Iterator[_Piece]:
    """Split consecutive tensors of a file into pieces: large tensors by themselves, small ones together."""
    small: list[memoryview] = []
    small_bytes = 0
    for view in places:
        size_bytes = len(view)
        if small and (size_bytes >= _DIRECT_BYTES or small_bytes + size_bytes > _STAGED_BYTES):
            yield _Piece(start, small_bytes, small)
            start, small, small_bytes = start + small_bytes, [], 0
        if size_bytes < _DIRECT_BYTES:
            small.append(view)
            small_bytes += size_bytes
            continue
        for low in range(0, size_bytes, _PIECE_BYTES):
            piece = view[low : low + _PIECE_BYTES]
            yield _Piece(start + low, len(piece), (piece,))
        start += size_bytes
    if small:
        yield _Piece(start, small_bytes, small)


class _Reading:
    """A part that is read sequentially, and the digest of the bytes read so far."""

    def __init__(self, part: Part, fetch: Fetch, workers: Workers) -> None:
        self.part = part
        self._fetch, self._workers = fetch, workers
        self._digest, self._expected = expected_digest(part)
        self._staging: list[memoryview] = []

    def header(self) -> tuple[int, dict[str, str], list[tensorfile.TensorEntry]]:
        """Read the header; return the offset of the tensors, the metadata, and the tensors in file order."""
        head = bytearray(min(_HEAD_BYTES, self.part.size_bytes))
        self._fill(memoryview(head), 0)
        start = tensorfile.header_end(head, self.part.size_bytes)
        if start > len(head):
            rest = bytearray(start - len(head))
            self._fill(memoryview(rest), len(head))
            head += rest
        self._digest.update(memoryview(head)[:start])
        return (start, *tensorfile.header(head[tensorfile.LENGTH.size : start], self.part.size_bytes - start))

    def skip(self, size_bytes: int) -> None:
        """Read the first bytes only for the checksum."""
        head = memoryview(bytearray(size_bytes))
        self._fill(head, 0)
        self._digest.update(head)

    def read(self, pieces: Iterable[_Piece]) -> None:
        """Fetch the pieces, several concurrently, and add each to the digest in order."""
        under_way: deque[tuple[_Piece, memoryview, Future[None]]] = deque()
        for number, piece in enumerate(pieces):
            if len(under_way) >= _AHEAD:
                self._take(*under_way.popleft())
            view = piece.into[0] if len(piece.into) == 1 else self._staged(number % _AHEAD, piece.size_bytes)
            under_way.append((piece, view, self._workers.submit(self._fill, view, piece.start)))
        while under_way:
            self._take(*under_way.popleft())

    def check(self) -> None:
        """Raise CorruptCheckpointError if the bytes that were read do not match the part's checksum."""
        if self._digest.hexdigest() != self._expected:
            raise CorruptCheckpointError(f"{self.part.key} does not match its checksum")

    def _fill(self, view: memoryview, start: int) -> None:
        if self._fetch(view, start) != len(view):
            raise CorruptCheckpointError(f"{self.part.key} does not have {self.part.size_bytes} bytes")

    def _take(self, piece: _Piece, view: memoryview, done: "Future[None]") -> None:
        done.result()
        self._digest.update(view)
        if len(piece.into) > 1:
            low = 0
            for target in piece.into:
                high = low + len(target)
                target[:] = view[low:high]
                low = high

    def _staged(self, slot: int, size_bytes: int) -> memoryview:
        """Return the staging buffer of a slot. Its last piece, `_AHEAD` pieces ago, is already consumed."""
        while len(self._staging) <= slot:
            self._staging.append(aligned(min(_STAGED_BYTES, self.part.size_bytes)))
        return self._staging[slot][:size_bytes]


@contextmanager
def _reading(store: ObjectStore, part: Part) -> Iterator[_Reading]:
    """Open a part for one sequential read. On exit, verify its size and checksum."""
    with readable(part.key):
        if not part.size_bytes:
            _check_size(store, part)
        opened: AbstractContextManager[Any] = store.opened(part.key)
        # The workers are stopped before the object is closed: they must not read from a closed file.
        with opened as fetch, Workers(min(_FETCHES, 1 + part.size_bytes // _STAGED_BYTES)) as workers:
            reading = _Reading(part, fetch, workers)
            yield reading
        _check_size(store, part)
    reading.check()


def _check_size(store: ObjectStore, part: Part) -> None:
    size_bytes = store.size(part.key)
    if size_bytes != part.size_bytes:
        raise CorruptCheckpointError(f"{part.key}: has {size_bytes} bytes; should have {part.size_bytes}")
