"""Loads the file of a torch module into the live module, without `load_state_dict`.

This is possible if the file begins like the file that a save of the module would write now: it then has the same names,
types and shapes. The load only copies bytes, so no error of the module can leave it partly loaded, and a large module
can be read in place, without a second copy in memory. A module with hooks or a load method of its own has no layout.
"""

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, compress, pairwise, repeat
from operator import is_, or_
from typing import Any, NamedTuple

from mizzen.checkpoint import parts, tensorfile, trees
from mizzen.checkpoint.tensors import WIDTHS, live_memory, loaded, plain_types

_HOOKS = (
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_state_dict_hooks", "_state_dict_pre_hooks"
)  # fmt: skip
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_.-]+")


class ModuleLayout(NamedTuple):
    """The tensors of a live torch module, and the head of the file that a save of the module would write now."""

    head: bytes
    """The file up to the tensors."""
    tensors: list[Any]
    """The live tensors, in file order."""
    size_bytes: int
    """Size of the whole file."""

    @property
    def is_in_memory(self) -> bool:
        """Whether all tensors are in the memory of the host."""
        return all(tensor.is_cpu for tensor in self.tensors)

    def places(self) -> list[memoryview]:
        """Return the memory of the tensors, in file order. They must be in the memory of the host."""
        return [live_memory(tensor) if tensor.nbytes else memoryview(b"") for tensor in self.tensors]

    def fill(self, content: memoryview) -> None:
        """Copy the tensors from the content of the file."""
        import ctypes  # See `tensors.live_memory`.

        torch = loaded("torch")
        kind = torch.Tensor
        start = ctypes.addressof(ctypes.c_char.from_buffer(content))
        low = len(self.head)
        # `map` is faster than attributes in the loop: there may be ten thousand tensors.
        facts = [map(fact, self.tensors) for fact in (kind.nbytes.__get__, kind.is_cpu.__get__, kind.data_ptr)]
        for tensor, size_bytes, is_cpu, pointer in zip(self.tensors, *facts, strict=True):
            if is_cpu:
                ctypes.memmove(pointer, start + low, size_bytes)
            elif size_bytes:
                source = torch.frombuffer(content[low : low + size_bytes], dtype=torch.uint8)
                # Detached: torch refuses a copy into a parameter that requires a gradient.
                tensor.detach().copy_(source.view(tensor.dtype).view(tensor.shape))
            low += size_bytes

    def fill_from(self, pieces: Iterable[memoryview]) -> None:
        """Copy the tensors from the content of the file, which is given in pieces, in order."""
        torch = loaded("torch")
        tensors = iter(self.tensors)
        target = torch.empty(0, dtype=torch.uint8)
        skip = len(self.head)
        for piece in pieces:
            low = min(skip, len(piece))
            skip -= low
            while low < len(piece):
                while not len(target):
                    target = next(tensors).detach().reshape(-1).view(torch.uint8)
                part = piece[low : low + len(target)]
                target[: len(part)].copy_(torch.frombuffer(part, dtype=torch.uint8))
                target = target[len(part) :]
                low += len(part)


class ModuleState:
    """The `state_dict` of a torch module, in a tenth of the time if the module does not customise it.

    If the module has the same names as at the call before, they are not listed again.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._known: _Names | None = None

    def __call__(self) -> Any:
        """Return the state."""
        module = self._module
        if self._known is None or (state := self._known.state(module)) is None:
            torch = loaded("torch")
            plain, self._known = torch.nn.Module, None
            own, modules = (plain.state_dict, plain.get_extra_state), list(module.modules())
            kinds: set[Any] = {type(inner) for inner in modules}
            if (
                _own_tensors(module, torch) is None
                or any((kind.state_dict, kind.get_extra_state) != own for kind in kinds)
                or not all(isinstance(inner._parameters, dict) for inner in modules)  # Not those of TorchScript.
            ):
                return module.state_dict()
            self._known = _Names(module)
            state = self._known.state(module)
        return state


class _Names:
    """The names of the entries of a module and of those inside."""

    def __init__(self, module: Any) -> None:
        pairs = list(module.named_modules(remove_duplicate=False))
        modules = [one for _, one in pairs]
        self._inner = [one._modules for one in modules]
        self._modules = _values(self._inner)
        self._hidden = [one._non_persistent_buffers_set for one in modules]
        self._hooks = [getattr(one, name) for one in modules for name in _HOOKS]
        self._entries = [entries for one in modules for entries in (one._parameters, one._buffers)]
        self._before = self._listed()
        self._versions = [(name, one._version) for name, one in pairs]
        prefixes = [f"{name}." if name else "" for name, _ in pairs]
        self._is_saved, self._names = list[bool](), list[str]()
        for prefix, one in zip(prefixes, modules, strict=True):
            for entries, hidden in ((one._parameters, ()), (one._buffers, one._non_persistent_buffers_set)):
                saved = [key for key, value in entries.items() if value is not None and key not in hidden]
                self._is_saved += [key in saved for key in entries]
                self._names += [prefix + key for key in saved]

    def state(self, module: Any) -> Any:
        """Return the `state_dict` of the module; None if it may have other names than at the start."""
        values = _values(self._entries)
        if (
            any(self._hooks)
            or self._listed() != self._before
            or not all(map(is_, _values(self._inner), self._modules))
            or "state_dict" in vars(module)
        ):
            return None
        state: Any = OrderedDict(zip(self._names, compress(values, self._is_saved), strict=True))
        state._metadata = OrderedDict((name, {"version": version}) for name, version in self._versions)
        return state

    def _listed(self) -> list[Any]:
        names = [*chain.from_iterable(self._entries), *chain.from_iterable(self._inner), *map(len, self._hidden)]
        return names + list(map(is_, _values(self._entries), repeat(None)))


def _values(dicts: Iterable[Mapping[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(one.values() for one in dicts))


def quick_layout(part: str, module: Any, state: Any) -> ModuleLayout | None:
    """Like `module_layout`, in a tenth of the time, for most modules; None: use `module_layout`.

    `state` is the `state_dict` of the module. Flattening it would take longer than reading the file.
    """
    torch = loaded("torch")
    if torch is None or not isinstance(module, torch.nn.Module) or type(state) is not OrderedDict or len(state) < 2:
        return None
    own = _own_tensors(module, torch)
    keys, values = list(state), list(state.values())
    plain = all(map(_is_plain_key, keys)) and {torch.Tensor, torch.nn.Parameter}.issuperset(map(type, values))
    if own is None or not plain or list(own) != keys:
        return None
    kind, tags = torch.Tensor, [plain_types(torch).get(tensor.dtype) for tensor in values]
    try:
        places = list(map(kind.data_ptr, values))
        if places != list(map(kind.data_ptr, own.values())) or not all(tags) or not all(places):
            return None
        if any(map(kind.is_neg, values)) or not all(map(kind.is_contiguous, values)):
            return None
    except RuntimeError:  # A tensor has no memory of its own, for example because it is sparse.
        return None
    on_cpu, on_gpu = map(kind.is_cpu.__get__, values), map(kind.is_cuda.__get__, values)
    if not all(map(or_, on_cpu, on_gpu)) or _overlap(values):
        return None
    tree = ",".join([f'"{key}":{{"$torch":"{key}"}}' for key in keys])
    versions = getattr(state, "_metadata", None)
    text = f"{{{tree}}}"
    if isinstance(versions, Mapping):
        text = f'{{"$state_dict":[{text},{trees.flatten(part, versions).text}]}}'
    order = sorted(zip([-WIDTHS[str(tag)] for tag in tags], keys, range(len(keys)), strict=True))
    tensors = [values[index] for _, _, index in order]
    entries: list[str] = []
    shapes: dict[Any, str] = {}
    low = 0
    facts = map(kind.shape.__get__, tensors), map(kind.nbytes.__get__, tensors)
    for (_, key, index), shape, size in zip(order, *facts, strict=True):
        if shape not in shapes:
            shapes[shape] = str(list(shape)).replace(" ", "")
        high = low + size
        entries.append(f'"{key}":{{"dtype":"{tags[index]}","shape":{shapes[shape]},"data_offsets":[{low},{high}]}}')
        low = high
    head = tensorfile.head(parts.metadata(text, True), ",".join(entries))
    return ModuleLayout(head, tensors, len(head) + low)


def _is_plain_key(key: Any) -> bool:
    """Return whether a key is the name of its tensor in a file, and is written to JSON unchanged."""
    return type(key) is str and _PLAIN_KEY.fullmatch(key) is not None and key != tensorfile.METADATA


def module_layout(module: Any, flat: trees.Flat) -> ModuleLayout | None:
    """Return the layout of a torch module whose `state_dict` is `flat`; None if it has a customised load."""
    torch = loaded("torch")
    if torch is None or not isinstance(module, torch.nn.Module):
        return None
    own = _own_tensors(module, torch)
    if own is None or len(own) != len(flat.leaves):
        return None
    values = {name: value for name, (path, value) in flat.found.items() if len(path) == 1 and _is_own(own, path, value)}
    order = tensorfile.in_order(flat.tensors)
    if len(values) != len(order) or any(tensor.library != "torch" or tensor.was for _, tensor in order):
        return None
    tensors = [values[name] for name, _ in order]
    if not all(tensor.is_contiguous() and not tensor.is_neg() for tensor in tensors) or _overlap(tensors):
        return None
    head = tensorfile.head(parts.metadata(flat.text, True), tensorfile.entries(order))
    return ModuleLayout(head, tensors, len(head) + sum(tensor.nbytes for tensor in tensors))


def _own_tensors(module: Any, torch: Any) -> dict[str, Any] | None:
    """Return the parameters and buffers that `load_state_dict` fills by copying; None if it may do anything else."""
    plain, kind = torch.nn.Module, type(module)
    if kind.load_state_dict is not plain.load_state_dict or kind.state_dict is not plain.state_dict:
        return None
    if not vars(module).keys().isdisjoint(("load_state_dict", "state_dict")):
        return None  # Some libraries replace the methods of one object.
    found: dict[str, Any] = {}
    for name, inner in module.named_modules(remove_duplicate=False):
        if not _is_plain(inner):
            return None
        prefix = f"{name}." if name else ""
        found.update((prefix + key, tensor) for key, tensor in _entries(inner) if tensor is not None)
    return found


def _entries(module: Any) -> Iterator[tuple[str, Any]]:
    yield from module._parameters.items()
    hidden = module._non_persistent_buffers_set
    yield from ((key, tensor) for key, tensor in module._buffers.items() if key not in hidden)


def _is_own(own: dict[str, Any], path: tuple[str, ...], value: Any) -> bool:
    tensor = own.get(path[0])
    return tensor is not None and bool(tensor.data_ptr() == value.data_ptr())


def _is_plain(module: Any) -> bool:
    """Return whether a module loads with torch's own methods and without hooks."""
    kind = type(module)
    own = (kind._load_from_state_dict.__module__, kind._save_to_state_dict.__module__)
    return all(name.startswith("torch.nn.") for name in own) and not any(getattr(module, name) for name in _HOOKS)


def _overlap(tensors: list[Any]) -> bool:
    """Return whether two tensors share memory."""
    ranges = sorted((str(one.device), one.data_ptr(), one.nbytes) for one in tensors if one.nbytes)
    return any(
        device == other and start + size_bytes > low
        for (device, start, size_bytes), (other, low, _) in pairwise(ranges)
    )
