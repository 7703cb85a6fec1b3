"""Finds the tensors of a live module that a load can fill in place, so that no second copy of the module is in memory.

A tensor is used only if `load_state_dict` would do nothing but copy into it: the module has no load method of its own
and no hooks, and the tensor shares no memory with another one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from mizzen.checkpoint import tensorfile, trees
from mizzen.checkpoint.errors import StateError
from mizzen.checkpoint.tensors import loaded, memory_of


@dataclass(frozen=True)
class LiveTensor:
    """A tensor of a live module, its memory, and the type and shape that it has in a file."""

    value: Any
    memory: memoryview
    dtype: str
    shape: list[int]

    def fits(self, entry: tensorfile.TensorEntry) -> bool:
        """Return whether the tensor in a file has the same type and shape."""
        return (self.dtype, self.shape) == (entry.dtype, entry.shape)


Live: TypeAlias = Mapping[str, Mapping[str, LiveTensor]]
"""Part name to the live tensors of the part, by their names in the file."""


def live_tensors(part: str, module: Any) -> dict[str, LiveTensor]:
    """Return the tensors of a torch module that a load can fill in place, by their names in the file of `part`.

    Returns none if the module's state cannot be stored; the load then reports the reason.
    """
    torch = loaded("torch")
    if torch is None or not isinstance(module, torch.nn.Module):
        return {}
    own = {key: tensor.data_ptr() for key, tensor in _copied(module, torch)}
    if not own:
        return {}
    try:
        flat = trees.flatten(part, module.state_dict())
    except StateError:
        return {}
    ranges: list[tuple[int, int, str]] = []
    found: dict[str, LiveTensor] = {}
    for name, (path, value) in flat.found.items():
        stored = flat.tensors[name]
        memory = memory_of(value) if stored.library == "torch" else None
        if memory is None:
            continue
        address, view = memory
        ranges.append((address, address + len(view), name))
        if len(path) == 1 and own.get(path[0]) == address and stored.was is None:
            found[name] = LiveTensor(value, view, stored.dtype, list(stored.shape))
    for name in _overlapping(ranges):
        found.pop(name, None)
    return found


def _copied(module: Any, torch: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parameters and buffers that torch's own `load_state_dict` copies into, with their keys."""
    plain = torch.nn.Module
    kind = type(module)
    if kind.load_state_dict is not plain.load_state_dict or kind.state_dict is not plain.state_dict:
        return
    barred: list[str] = []
    for name, inner in module.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        if any(prefix.startswith(other) for other in barred):
            continue
        if not _is_plain(inner):
            barred.append(prefix)
            continue
        for key, tensor in (*inner._parameters.items(), *inner._buffers.items()):
            if tensor is not None and key not in inner._non_persistent_buffers_set:
                yield prefix + key, tensor


def _is_plain(module: Any) -> bool:
    """Return whether a module loads with torch's own methods and without hooks."""
    for method in ("_load_from_state_dict", "_save_to_state_dict"):
        if not getattr(type(module), method).__module__.startswith("torch.nn."):
            return False
    hooks = (
        "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_state_dict_hooks", "_state_dict_pre_hooks",
    )  # fmt: skip
    return not any(getattr(module, name, None) for name in hooks)


def _overlapping(ranges: list[tuple[int, int, str]]) -> set[str]:
    """Return the names of those ranges (start address, end address, name) that overlap another range."""
    out: set[str] = set()
    highest, before = 0, ""
    for low, high, name in sorted(ranges):
        if low < highest:
            out |= {name, before}
        if high > highest:
            highest, before = high, name
    return out
