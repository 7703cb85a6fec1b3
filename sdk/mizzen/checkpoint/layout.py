"""Encoding a part again that was encoded before: most states have the same tensors in the same places at every save.

A state of ten thousand small tensors takes longer to look through than to write. Where its form is that of the save
before (the same keys, and under each the same memory), names, header and places in the file are known, and the small
tensors are copied by one call. The file is the same to the byte.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from mizzen.checkpoint import parts, tensorfile, trees
from mizzen.checkpoint.tensors import SMALL_BYTES, Stored, live_memory, loaded
from mizzen.objects.store import Chunk
from mizzen.objects.workers import Workers

_LEAST = 64
"""Tensors of a part from which on its form is kept, and from which on they are copied by several threads."""
_COPIES = 2
"""Copies at the same time: one core does not fill the memory's bandwidth."""


class Encoder:
    """Encodes the parts of a state, save after save. The chunks of one save are used up when the next begins."""

    def __init__(self) -> None:
        self._layouts: dict[str, _Layout] = {}

    def encode(self, name: str, value: Any) -> tuple[str, list[Chunk]]:
        """As `parts.encode`.

        Raises:
            StateError: as `parts.encode`.
        """
        layout = self._layouts.pop(name, None)
        if layout is not None and (again := layout.encode(name, value)) is not None:
            self._layouts[name] = layout
            return parts.TENSORS, again
        flat: list[trees.Flat] = []
        encoded = parts.encode(name, value, flat.append)
        if flat and len(flat[0].tensors) >= _LEAST and all(tensor.plain for tensor in flat[0].tensors.values()):
            self._layouts[name] = _Layout(flat[0])
        return encoded

    def owns(self, chunk: Chunk) -> bool:
        """Whether a chunk is a copy already, which stays as it is until the next save."""
        if isinstance(chunk, bytes):
            return True
        block = memoryview(chunk).obj
        return any(block is mine for layout in self._layouts.values() for mine in layout.blocks)


@dataclass(frozen=True)
class _Large:
    """A tensor that is a chunk by itself."""

    leaf: int


@dataclass(frozen=True)
class _Block:
    """Small tensors that are one chunk."""

    memory: memoryview
    copies: "list[_Copy]"


@dataclass(frozen=True)
class _Copy:
    """Small tensors that follow each other in a block, copied by one call."""

    leaves: list[int]
    targets: list[Any]
    """One for each; a single one of one dimension for all if they are of one dimension as well, and of one type."""

    def make(self, sources: list[Any]) -> None:
        """Copy them; their shapes must be those of the layout."""
        torch = loaded("torch")
        with torch.no_grad():
            if len(self.targets) < len(sources):
                torch.cat(sources, out=self.targets[0])  # Half the time of copying one by one.
            else:
                torch._foreach_copy_(self.targets, sources)


class _Layout:
    """The form of one part."""

    def __init__(self, flat: trees.Flat) -> None:
        torch = loaded("torch")
        self._kinds = frozenset((torch.Tensor, torch.nn.Parameter))
        self._containers = flat.containers
        self._names = [{"$torch": name} for name, _ in flat.leaves]
        first: dict[str, int] = {}
        for index, (name, _) in enumerate(flat.leaves):
            first.setdefault(name, index)
        order = tensorfile.in_order(flat.tensors)
        self._entries = tensorfile.entries(order)
        self._chunks: list[_Large | _Block] = []
        group: list[tuple[int, Any]] = []
        for name, _ in order:
            leaf = first[name]
            value = flat.leaves[leaf][1]
            if value.nbytes < SMALL_BYTES:
                group.append((leaf, value))
                continue
            self._close(group, torch)
            self._chunks.append(_Large(leaf))
        self._close(group, torch)
        self._large = [chunk.leaf for chunk in self._chunks if isinstance(chunk, _Large)]
        values = [value for _, value in flat.leaves]
        self._shapes, self._form = _shapes(values), _form(values, self._large)
        self._scalars = ""
        self._head = b""
        """As it is with these scalars."""
        self.blocks = [chunk.memory.obj for chunk in self._chunks if isinstance(chunk, _Block)]

    def encode(self, part: str, value: Any) -> list[Chunk] | None:
        """The content of the file of the part; None: its form is another one now."""
        walk = _Walk(part, self._kinds, self._names)
        try:
            tree = walk.written(value, ())
        except (_Changed, RecursionError):
            return None
        # With other shapes there would be other sizes, which have no place in the blocks.
        if walk.containers != self._containers or _shapes(walk.values) != self._shapes:
            return None
        with Workers(_COPIES) as workers:
            # Copied while the form is still compared: the blocks are ours, whatever is written into them.
            copies = [
                workers.submit(copy.make, [walk.values[leaf] for leaf in copy.leaves])
                for chunk in self._chunks
                if isinstance(chunk, _Block)
                for copy in chunk.copies
            ]
            try:
                same = _form(walk.values, self._large) == self._form
            except RuntimeError:  # One of them has no memory of its own any more: it is sparse now, for instance.
                same = False
            if not same:
                return None
            for copied in copies:
                copied.result()
        chunks: list[Chunk] = [
            live_memory(walk.values[chunk.leaf]) if isinstance(chunk, _Large) else chunk.memory
            for chunk in self._chunks
        ]
        # Not by ==, for which 1, 1.0 and True are the same.
        scalars = repr(walk.scalars)
        if scalars != self._scalars:
            self._head = tensorfile.head(parts.metadata(trees.text_of(tree), True), self._entries)
            self._scalars = scalars
        return [self._head, *chunks]

    def _close(self, group: list[tuple[int, Any]], torch: Any) -> None:
        """Make a block of what is in `group`."""
        if not group:
            return
        block = torch.empty(sum(value.nbytes for _, value in group), dtype=torch.uint8)
        copies, low = [], 0
        for piece, flat in _pieces(group):
            leaves, high = [leaf for leaf, _ in piece], low + sum(value.nbytes for _, value in piece)
            # The widest types come first, so each begins at a multiple of its own width.
            targets = [block[low:high].view(piece[0][1].dtype)] if flat else []
            for _, value in () if flat else piece:
                targets.append(block[low : low + value.nbytes].view(value.dtype).view(value.shape))
                low += value.nbytes
            copies.append(_Copy(leaves, targets))
            low = high
        if low:
            self._chunks.append(_Block(live_memory(block), copies))
        group.clear()


def _pieces(group: list[tuple[int, Any]]) -> Iterator[tuple[list[tuple[int, Any]], bool]]:
    """What to copy by one call each, for several threads; and whether all of it has one dimension and one type."""
    runs: list[tuple[list[tuple[int, Any]], bool]] = []
    for (flat, _), equal in groupby(group, lambda one: (one[1].dim() == 1, one[1].dtype)):
        run = list(equal)
        alone = flat and len(run) >= _LEAST
        if runs and not alone and not runs[-1][1]:
            runs[-1][0].extend(run)
        else:
            runs.append((run, alone))
    size = max(_LEAST, -(-len(group) // _COPIES))
    for run, flat in runs:
        for low in range(0, len(run), size):
            yield run[low : low + size], flat


def _shapes(tensors: Sequence[Any]) -> list[Any]:
    """The shape of each."""
    return list(map(loaded("torch").Tensor.shape.__get__, tensors))


def _form(tensors: Sequence[Any], large: Sequence[int]) -> list[Any]:
    """What says, beside shapes, whether tensors are in the same memory as before, in the form that a file has.

    Those at the places `large` go into the file as they are in memory; copies of the others are in its form anyway.
    """
    kind = loaded("torch").Tensor
    return [
        # By `map`, not a loop: there may be ten thousand of them.
        list(map(kind.data_ptr, tensors)),
        list(map(kind.dtype.__get__, tensors)),
        all(tensors[n].is_cpu and tensors[n].is_contiguous() and not tensors[n].is_neg() for n in large),
    ]


class _Changed(Exception):
    """There is something else than at the save before."""


class _Walk(trees.Flattening):
    """As its base, but tensors are only gathered: each gets the name of the one in its place."""

    def __init__(self, part: str, kinds: frozenset[type], names: Sequence[Any]) -> None:
        super().__init__(part)
        self._kinds, self._names = kinds, names
        self.values: list[Any] = []
        self.scalars: list[Any] = []
        """What is no tensor and holds none, as it is written."""

    def written(self, value: Any, path: tuple[str, ...]) -> Any:
        """See `trees.Flattening.written`."""
        if type(value) not in self._kinds:
            written = super().written(value, path)
            if not isinstance(value, Mapping | list | tuple):
                self.scalars.append(written)
            return written
        if len(self.values) == len(self._names):
            raise _Changed
        self.values.append(value)
        return self._names[len(self.values) - 1]

    def _mapping(self, value: Mapping[Any, Any], path: tuple[str, ...]) -> dict[str, Any]:
        """See `trees.Flattening`. A module's state is one dict of tensors: all of them at once."""
        tensors = len(value) > 1 and self._kinds.issuperset(map(type, value.values()))
        if not (tensors and {str}.issuperset(map(type, value))):
            return super()._mapping(value, path)
        self.containers.append((type(value), *value))
        low = len(self.values)
        self.values.extend(value.values())
        if len(self.values) > len(self._names):
            raise _Changed
        return dict(zip(value, self._names[low : len(self.values)], strict=True))

    def _set_aside(self, tensor: Stored, path: tuple[str, ...], value: Any) -> str:
        raise _Changed
