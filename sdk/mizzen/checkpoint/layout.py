"""Fast path for encoding a part whose tensors have the same layout as at the previous save.

Traversing a state of ten thousand small tensors takes longer than writing it. If its keys, and the memory under each
key, are the same as at the previous save, the names, the header and the file offsets are reused, and the small tensors
are copied in batches. The resulting file is identical to the one of `parts.encode`.
"""

import contextlib
import gc
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from mizzen.checkpoint import parts, tensorfile, trees
from mizzen.checkpoint.gpu_copies import DEFAULT_PINNED_BYTES, GpuCopies
from mizzen.checkpoint.marks import ATOMS
from mizzen.checkpoint.tensors import SMALL_BYTES, Stored, live_memory, loaded
from mizzen.objects.store import Chunk
from mizzen.objects.workers import Workers

_LEAST = 64
"""Minimum number of tensors of a part whose layout is cached; also the minimum number of tensors in a copy piece."""
_PIECES = 16
"""Small tensors are copied in this many pieces by two threads: one core does not saturate the memory bandwidth."""


class Encoder:
    """Encodes the parts of a state at every save. The chunks of a save are valid only until the next save begins."""

    def __init__(self, pinned_bytes: int = DEFAULT_PINNED_BYTES, gpu_copy_bytes: int | None = None) -> None:
        """Set the limits of copies of tensors on GPUs; see `CheckpointSettings`."""
        self._layouts: dict[str, _Layout] = {}
        self._gpu = GpuCopies(pinned_bytes, gpu_copy_bytes)

    def encode(self, state: Mapping[str, Any], *, later: bool = False) -> dict[str, tuple[str, list[Chunk]]]:
        """Encode each part as `parts.encode` does.

        `later`: the chunks with tensors of GPUs are filled only by `finish`.

        Raises:
            StateError: see `parts.encode`.
        """
        self._gpu.begin(later)
        return {name: self._encoded(name, value) for name, value in state.items()}

    def _encoded(self, name: str, value: Any) -> tuple[str, list[Chunk]]:
        layout = self._layouts.pop(name, None)
        with _no_collection():
            again = layout.encode(name, value) if layout is not None else None
        if layout is not None and again is not None:
            self._layouts[name] = layout
            return parts.TENSORS, again
        flat: list[trees.Flat] = []
        encoded = parts.encode(name, value, flat.append, self._gpu.take)
        if flat and len(flat[0].tensors) >= _LEAST and all(tensor.plain for tensor in flat[0].tensors.values()):
            self._layouts[name] = _Layout(flat[0])
        return encoded

    def finish(self) -> None:
        """Fill the chunks that `encode` has left for later. May run in another thread, while the training continues.

        Raises:
            RuntimeError: a GPU reports an error.
        """
        self._gpu.finish()

    def drop(self) -> None:
        """Free the memory on GPUs that `finish` would copy, because the save has failed."""
        self._gpu.begin(later=False)

    def owns(self, chunk: Chunk) -> bool:
        """Return whether a chunk is already a copy, or will be one, which stays valid until the next save."""
        if isinstance(chunk, bytes):
            return True
        block = memoryview(chunk).obj
        return self._gpu.owns(block) or any(
            block is mine for layout in self._layouts.values() for mine in layout.blocks
        )


_Form = tuple[list[Any], list[int], list[Any]]
"""Shapes, memory addresses and types of several tensors."""


class _Large(NamedTuple):
    """A large tensor, which is one chunk."""

    leaf: int


class _Block(NamedTuple):
    """Small tensors that share one chunk."""

    memory: memoryview
    copies: "list[_Copy]"


class _Copy(NamedTuple):
    """Small tensors that are consecutive in a block and are copied by one call."""

    leaves: list[int]
    form: _Form
    target: Any
    """A one-dimensional tensor if all tensors have one dimension and one type; otherwise a list with one for each."""

    def make(self, sources: list[Any]) -> None:
        """Copy `sources` into the block. Their form must equal `form`, because the block is sized for it."""
        torch = loaded("torch")
        # One call each, because this thread may wait for the GIL after a call.
        with torch.no_grad():
            if isinstance(self.target, list):
                torch._foreach_copy_(self.target, sources)
            else:
                torch.cat(sources, out=self.target)  # Takes two thirds of the time of separate copies.


class _Layout:
    """The cached layout of one part."""

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
        self._copies = [copy for chunk in self._chunks if isinstance(chunk, _Block) for copy in chunk.copies]
        copied = {leaf for copy in self._copies for leaf in copy.leaves}
        self._others = [leaf for leaf in range(len(flat.leaves)) if leaf not in copied]
        """Tensors that are not copied: large ones, empty ones, and further occurrences of the same tensor."""
        self._form = _form([flat.leaves[leaf][1] for leaf in self._others])
        places = [value.data_ptr() for _, value in flat.leaves]
        seen = Counter(places)
        shared = [leaf for leaf, place in enumerate(places) if seen[place] > 1]
        self._strided = sorted({*self._others, *shared})
        """Tensors whose strides are compared, too: the others, and tensors at the same address as another one."""
        self._strides = [flat.leaves[leaf][1].stride() for leaf in self._strided]
        self._known: dict[str, tuple[list[Any], Any]] = {}
        self._scalars = ""
        self._head = b""
        """The file's header for the current `_scalars`."""
        self.blocks = [chunk.memory.obj for chunk in self._chunks if isinstance(chunk, _Block)]

    def encode(self, part: str, value: Any) -> list[Chunk] | None:
        """Return the file content of the part as chunks; None if its layout has changed."""
        walk = _Walk(part, self._kinds, self._names, self._known)
        try:
            tree = walk.written(value, ())
        except (_Changed, RecursionError):
            return None
        if walk.containers != self._containers or not self._copied(walk.values):
            return None
        chunks: list[Chunk] = [
            live_memory(walk.values[chunk.leaf]) if isinstance(chunk, _Large) else chunk.memory
            for chunk in self._chunks
        ]
        # Compare by repr, not by ==, which treats 1, 1.0 and True as equal.
        scalars = repr(walk.scalars)
        if scalars != self._scalars:
            self._head = tensorfile.head(parts.metadata(trees.text_of(tree), True), self._entries)
            self._scalars = scalars
        return [self._head, *chunks]

    def _copied(self, values: Sequence[Any]) -> bool:
        """Copy the small tensors into their blocks. Return False if a tensor's form has changed since the last save."""
        ready: deque[tuple[_Copy, list[Any]]] = deque()
        with Workers(1) as workers:
            helper = None
            try:
                for copy in self._copies:
                    sources = [values[leaf] for leaf in copy.leaves]
                    if _form(sources) != copy.form:
                        return False
                    ready.append((copy, sources))
                    # Copying may start before all forms are compared: if a later form differs, the blocks are dropped.
                    helper = helper or workers.submit(_make_all, ready)
                    time.sleep(0)  # Passes the GIL to the other thread, which would get it only after 5 ms.
                if not self._others_unchanged(values):
                    return False
            except RuntimeError:  # A tensor no longer has memory of its own, for example because it is sparse now.
                return False
            _make_all(ready)
            if helper is not None:
                helper.result()
        return True

    def _others_unchanged(self, values: Sequence[Any]) -> bool:
        strides = [values[leaf].stride() for leaf in self._strided]
        same = _form([values[leaf] for leaf in self._others]) == self._form and strides == self._strides
        return same and self._large_as_stored(values)

    def _large_as_stored(self, values: Sequence[Any]) -> bool:
        """Return whether the large tensors are contiguous and on the CPU, so that they are written without a copy."""
        large = [values[leaf] for leaf in self._large]
        return all(value.is_cpu and value.is_contiguous() and not value.is_neg() for value in large)

    def _close(self, group: list[tuple[int, Any]], torch: Any) -> None:
        """Make one block of the tensors in `group`, and clear `group`."""
        if not group:
            return
        block = torch.empty(sum(value.nbytes for _, value in group), dtype=torch.uint8)
        copies, low = [], 0
        for piece, flat in _pieces(group):
            leaves, high = [leaf for leaf, _ in piece], low + sum(value.nbytes for _, value in piece)
            # The widest types come first, so each begins at a multiple of its own width.
            values, targets = [value for _, value in piece], []
            for value in () if flat else values:
                targets.append(block[low : low + value.nbytes].view(value.dtype).view(value.shape))
                low += value.nbytes
            target = block[low:high].view(values[0].dtype) if flat else targets
            copies.append(_Copy(leaves, _form(values), target))
            low = high
        if low:
            self._chunks.append(_Block(live_memory(block), copies))
        group.clear()


def _pieces(group: list[tuple[int, Any]]) -> Iterator[tuple[list[tuple[int, Any]], bool]]:
    """Yield pieces to copy by one call each, and whether the piece's tensors all have one dimension and one type."""
    runs: list[tuple[list[tuple[int, Any]], bool]] = []
    for (flat, _), equal in groupby(group, lambda one: (one[1].dim() == 1, one[1].dtype)):
        run = list(equal)
        alone = flat and len(run) >= _LEAST
        if runs and not alone and not runs[-1][1]:
            runs[-1][0].extend(run)
        else:
            runs.append((run, alone))
    size = max(_LEAST, -(-len(group) // _PIECES))
    for run, flat in runs:
        for low in range(0, len(run), size):
            yield run[low : low + size], flat


def _make_all(ready: "deque[tuple[_Copy, list[Any]]]") -> None:
    """Make the copies that the other thread has not started yet: two threads share the copying."""
    while ready:
        try:
            copy, sources = ready.popleft()
        except IndexError:  # The other thread has taken the last one.
            return
        copy.make(sources)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection in this context: ten thousand short-lived objects would trigger it many times."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _form(tensors: Sequence[Any]) -> _Form:
    """Return shapes, addresses and types of tensors, to detect whether they have changed since the last save.

    Strides are left out: a copy is in C order anyway. `_Layout._strided` has the exceptions.

    Raises:
        RuntimeError: a tensor has no memory of its own, for example because it is sparse.
    """
    kind = loaded("torch").Tensor
    # `map` is faster than a loop: there may be ten thousand tensors.
    return (
        list(map(kind.shape.__get__, tensors)),
        list(map(kind.data_ptr, tensors)),
        list(map(kind.dtype.__get__, tensors)),
    )


_VERSIONS = ("_metadata",)
"""Path of the versions in the state of a module."""


def _has_only_atoms(versions: Mapping[Any, Any]) -> bool:
    return all(type(one) is dict and ATOMS.issuperset(map(type, one.values())) for one in versions.values())


class _Changed(Exception):
    """The tree differs from the one of the previous save."""


class _Walk(trees.Flattening):
    """A traversal that only collects the tensors; each gets the name that the previous save gave at its position."""

    def __init__(
        self, part: str, kinds: frozenset[type], names: Sequence[Any], known: dict[str, tuple[list[Any], Any]]
    ) -> None:
        """`known`: the versions of a module's state, by their text; a walk adds them."""
        super().__init__(part)
        self._kinds, self._names, self._known = kinds, names, known
        self.values: list[Any] = []
        self.scalars: list[Any] = []
        """The JSON forms of all values that are neither tensors nor containers."""

    def written(self, value: Any, path: tuple[str, ...]) -> Any:
        """Return the JSON form of a value; collect tensors instead of encoding them."""
        if path == _VERSIONS and type(value) is OrderedDict and _has_only_atoms(value):
            return self._versions(value, path)
        if type(value) not in self._kinds:
            written = super().written(value, path)
            if not isinstance(value, Mapping | list | tuple):
                self.scalars.append(written)
            return written
        if len(self.values) == len(self._names):
            raise _Changed
        self.values.append(value)
        return self._names[len(self.values) - 1]

    def _versions(self, value: Mapping[Any, Any], path: tuple[str, ...]) -> Any:
        """See `written`. There is one version for each module, and they seldom change."""
        text = repr(value)
        if text not in self._known:
            low = len(self.containers)
            written = super().written(value, path)
            self._known.clear()
            self._known[text] = self.containers[low:], written
            del self.containers[low:]
        containers, written = self._known[text]
        self.containers += containers
        self.scalars.append(text)
        return written

    def _mapping(self, value: Mapping[Any, Any], path: tuple[str, ...]) -> dict[str, Any]:
        """See `trees.Flattening`. A dict of tensors only, such as a module's state, is collected in one step."""
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
