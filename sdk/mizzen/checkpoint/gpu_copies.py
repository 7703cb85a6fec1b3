"""Copies tensors of a GPU to the host, with a short stall of the training.

A save in the background first copies the tensors within the memory of the GPU, in milliseconds, and the training
continues. `finish`, in another thread, then copies them to the host through two pinned buffers: while one is filled by
the GPU, the other is emptied into ordinary memory. Pinning memory for the whole state would take seconds, and the
operating system could not use it for anything else.

Tensors for which the GPU has no room are copied to the host at once, and so are all tensors of a synchronous save.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from mizzen.checkpoint.snapshot import move
from mizzen.checkpoint.tensors import live_memory, loaded
from mizzen.objects.buffers import mapped
from mizzen.objects.workers import Workers

DEFAULT_PINNED_BYTES = 256 << 20
LEAST_PINNED_BYTES = 1 << 20
_GROUP_BYTES = 512 << 20
"""Tensors are copied within the GPU in groups of up to this size: the memory of a group is free once it is copied."""
_SMALL_BYTES = 1 << 20
_RESERVE = 32
"""One part in this many of the GPU's memory stays free, because the caching allocator rounds sizes up."""
_COPYING_THREADS = 2


class _Group(NamedTuple):
    """Tensors that were copied within the GPU, and must still be copied to the host."""

    copy: Any
    """The bytes of the tensors, one after another, on the GPU."""
    copied: Any
    """The event after which `copy` is complete."""
    target: memoryview


class GpuCopies:
    """Copies the tensors of one process, for one save at a time."""

    def __init__(self, pinned_bytes: int = DEFAULT_PINNED_BYTES, gpu_copy_bytes: int | None = None) -> None:
        """Set the limits; see `CheckpointSettings`."""
        self._half_bytes = 1 << (pinned_bytes // 2).bit_length() - 1
        """Size of a pinned buffer: a power of two, because torch rounds pinned memory up to one."""
        self._limit_bytes = gpu_copy_bytes
        self._buffers: list[Any] = []
        self._later = False
        self._groups: deque[_Group] = deque()
        self._hosts: list[memoryview] = []
        """Memory of the copies on the host, which later saves use again: its pages are already mapped."""
        self._used = 0
        self._rooms: dict[Any, _Room] = {}

    def begin(self, later: bool) -> None:
        """Begin a save. `later`: whether `finish` will be called, so that tensors may be copied to the host then."""
        self._groups.clear()
        self._later, self._used = later, 0
        for room in self._rooms.values():
            room.begin()
        if not later:
            self._hosts.clear()

    def take(self, tensors: Sequence[Any]) -> memoryview:
        """Return memory for the tensors' elements in C order, one tensor after another.

        It is filled when this returns, or, if `later` was set, after `finish`.
        """
        with loaded("torch").no_grad():
            flat = [bytes_of(tensor) for tensor in tensors]
            host = self._memory(sum(map(len, flat)))
            low = 0
            for group in _groups(flat):
                high = low + sum(map(len, group))
                target = host[low:high]
                held = self._held(group, high - low) if self._later else None
                if held is None:
                    self._transfer(group, target, _event(group[0].device))
                else:
                    self._groups.append(_Group(held, _event(group[0].device), target))
                low = high
        return host

    def finish(self) -> None:
        """Copy everything to the host that is not copied yet. May run in another thread, while the training continues.

        Raises:
            RuntimeError: the GPU reports an error.
        """
        while self._groups:
            group = self._groups.popleft()
            self._transfer([group.copy], group.target, group.copied)

    def owns(self, memory: object) -> bool:
        """Return whether `memory` is the object behind a result of `take`."""
        return any(memory is host.obj for host in self._hosts)

    def _memory(self, size_bytes: int) -> memoryview:
        """Return memory on the host that no other result of `take` uses in this save."""
        if not size_bytes:
            return memoryview(bytearray())
        if self._used == len(self._hosts) or len(self._hosts[self._used]) < size_bytes:
            self._hosts[self._used : self._used + 1] = [mapped(size_bytes)]
        self._used += 1
        return self._hosts[self._used - 1][:size_bytes]

    def _held(self, group: Sequence[Any], size_bytes: int) -> Any:
        """Copy a group within the GPU; return None if there is no room."""
        torch, device = loaded("torch"), group[0].device
        if device not in self._rooms:
            self._rooms[device] = _Room(device, self._limit_bytes)
        room = self._rooms[device]
        if not room.has(size_bytes):
            return None
        try:
            # Memory that was allocated for another stream stays apart from the training's: it is not cut into pieces
            # for activations, and the allocator gives it back to the GPU before the training would run out of memory.
            with _on(room.stream):
                copy = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        except torch.cuda.OutOfMemoryError:
            return None
        room.taken_bytes += size_bytes
        targets = copy.split(list(map(len, group)))
        small = [index for index, one in enumerate(group) if len(one) < _SMALL_BYTES]
        if small:
            torch._foreach_copy_([targets[index] for index in small], [group[index] for index in small])
        for target, source in zip(targets, group, strict=True):
            if len(source) >= _SMALL_BYTES:
                target.copy_(source, non_blocking=True)
        return copy

    def _transfer(self, sources: Sequence[Any], target: memoryview, ready: Any) -> None:
        """Copy bytes of a GPU to the host, after the event `ready`; return when they are there."""
        if not self._buffers:
            self._buffers = [_pinned(self._half_bytes, sources[0].is_cuda) for _ in range(2)]
        stream = _stream(sources[0].device)
        low = 0
        filling: tuple[Any, memoryview, memoryview] | None = None
        with Workers(_COPYING_THREADS) as workers, _on(stream):
            if ready is not None:
                stream.wait_event(ready)
            for number, piece in enumerate(_pieces(sources, self._half_bytes)):
                buffer, filled = self._buffers[number % 2], 0
                for part in piece:
                    buffer[filled : filled + len(part)].copy_(part, non_blocking=True)
                    filled += len(part)
                event = _event(sources[0].device)
                if filling is not None:
                    _empty(workers, *filling)
                filling = event, live_memory(buffer)[:filled], target[low : low + filled]
                low += filled
            if filling is not None:
                _empty(workers, *filling)


class _Room:
    """How much memory of one GPU a save may use for copies, beside what the training needs."""

    def __init__(self, device: Any, limit_bytes: int | None) -> None:
        self.stream = _stream(device)
        self.taken_bytes = 0
        """Bytes copied in this save."""
        self._device, self._limit_bytes = device, limit_bytes
        self._most_taken_bytes = 0
        self._peak_bytes = 0
        """Most memory that tensors of the training have used so far."""
        self._room_bytes: int | None = None

    def begin(self) -> None:
        """Begin a save."""
        self._most_taken_bytes = max(self._most_taken_bytes, self.taken_bytes)
        self.taken_bytes, self._room_bytes = 0, None

    def has(self, size_bytes: int) -> bool:
        """Return whether there is room for another copy of this size."""
        if self._room_bytes is None:
            self._room_bytes = self._free_bytes() if self._limit_bytes is None else self._limit_bytes
        return self.taken_bytes + size_bytes <= self._room_bytes

    def _free_bytes(self) -> int:
        """Return the memory that is left if the training needs as much as it ever has needed."""
        cuda = loaded("torch").cuda
        try:
            free, total = cuda.mem_get_info(self._device)
            # The peak may contain copies of earlier saves, and then less of the training: never more than all of them.
            peak = cuda.max_memory_allocated(self._device) - self._most_taken_bytes
            self._peak_bytes = max(self._peak_bytes, peak, cuda.memory_allocated(self._device))
            return int(free + cuda.memory_reserved(self._device) - self._peak_bytes - total // _RESERVE)
        except RuntimeError:  # An allocator without these numbers.
            return 0


def bytes_of(tensor: Any) -> Any:
    """Return the elements of a tensor in C order as a tensor of bytes with one dimension, on the same device."""
    torch = loaded("torch")
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.contiguous().reshape(-1).view(torch.uint8)


def _groups(flat: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield consecutive tensors of one device, up to `_GROUP_BYTES` or a single tensor."""
    group: list[Any] = []
    size = 0
    for one in flat:
        if group and (one.device != group[0].device or size + len(one) > _GROUP_BYTES):
            yield group
            group, size = [], 0
        group.append(one)
        size += len(one)
    if group:
        yield group


def _pieces(sources: Sequence[Any], size_bytes: int) -> Iterator[list[Any]]:
    """Yield the bytes of `sources` in order, as lists of slices that together have up to `size_bytes` bytes."""
    piece: list[Any] = []
    left = size_bytes
    for source in sources:
        low = 0
        while low < len(source):
            part = source[low : low + left]
            piece.append(part)
            low += len(part)
            left -= len(part)
            if not left:
                yield piece
                piece, left = [], size_bytes
    if piece:
        yield piece


def _empty(workers: Workers, filled: Any, buffer: memoryview, target: memoryview) -> None:
    """Copy a pinned buffer to ordinary memory, once the GPU has filled it, without holding the GIL."""
    if filled is not None:
        filled.synchronize()
    each = -(-len(buffer) // _COPYING_THREADS)
    copies = [
        workers.submit(move, target[low : low + each], buffer[low : low + each]) for low in range(0, len(buffer), each)
    ]
    for copy in copies:
        copy.result()


def _pinned(size_bytes: int, pin: bool) -> Any:
    torch = loaded("torch")
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pin)
    except RuntimeError:  # The system does not let this process pin so much.
        return torch.empty(size_bytes, dtype=torch.uint8)


# The functions below do nothing for tensors on the CPU, with which the tests run the same code without a GPU.


def _stream(device: Any) -> Any:
    return loaded("torch").cuda.Stream(device) if device.type == "cuda" else None


def _on(stream: Any) -> AbstractContextManager[Any]:
    return loaded("torch").cuda.stream(stream) if stream is not None else nullcontext()


def _event(device: Any) -> Any:
    """Return an event of the current stream of `device`, after all work that was started there so far."""
    if device.type != "cuda":
        return None
    cuda = loaded("torch").cuda
    event = cuda.Event(blocking=True)
    event.record(cuda.current_stream(device))
    return event
