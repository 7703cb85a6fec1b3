"""The modules of a torch module. Those at the restore are compared in a microsecond for each, by a save."""

from collections.abc import Iterator, Set
from operator import attrgetter, is_
from typing import Any, TypeAlias

from mizzen.checkpoint.tensors import loaded

Named: TypeAlias = list[tuple[str, Any]]
"""Modules with their paths."""


class KnownModules:
    """A module and those inside. Modules that are the same objects need not be listed again."""

    def __init__(self, pairs: Named, excluded: Set[str]) -> None:
        """Compares nothing yet.

        Args:
            pairs: the modules, with their paths.
            excluded: the names of attributes that need not be compared.
        """
        self.pairs = pairs
        self.mutable: Named = []
        """Those in which something may change while their attributes are the same objects."""
        self._inner = _Values([one._modules for _, one in pairs], frozenset())
        self._attributes = _Values([one.__dict__ for _, one in pairs], excluded)
        self._training = self._trained()

    def are_same(self) -> bool:
        """Return whether the modules are the same objects."""
        return self._inner.are_same()

    def suspects(self, now: Named) -> Named:
        """Return those of the modules `now` in which something may have changed."""
        return self.mutable if now is self.pairs and self._attributes.are_same() else now

    def have_mode(self) -> bool:
        """Return whether each of them is in the mode, training or evaluation, that it was in."""
        return self._trained() == self._training

    def _trained(self) -> list[bool]:
        return list(map(attrgetter("training"), (one for _, one in self.pairs)))


class _Values:
    """Values of many dicts."""

    def __init__(self, dicts: list[dict[str, Any]], excluded: Set[str]) -> None:
        self._dicts = dicts
        self._number = sum(map(len, dicts))
        self._keys = [(each, key) for each in dicts for key in each if key not in excluded]
        self._values = self._now()

    def are_same(self) -> bool:
        """Return whether the dicts have as many keys as at the start, and the same objects as values."""
        return sum(map(len, self._dicts)) == self._number and all(map(is_, self._now(), self._values))

    def _now(self) -> list[Any]:
        return [each.get(key) for each, key in self._keys]


def is_module(value: Any) -> bool:
    """Return whether a value is a module of torch. The attributes of compiled ones of TorchScript are not in Python."""
    torch = loaded("torch")
    return torch is not None and isinstance(value, torch.nn.Module) and not isinstance(value, torch.jit.ScriptModule)


def named_modules(value: Any, name: str) -> Named:
    """Return a module and those inside, each once, with their names: in a third of the time of `named_modules`."""
    found, left, seen = list[tuple[str, Any]](), [(name, value)] if is_module(value) else [], set[int]()
    while left:
        name, one = pair = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            found.append(pair)
            if one._modules:
                before = f"{name}." if name else ""
                left += [(before + key, inner) for key, inner in one._modules.items() if is_module(inner)]
    return found


def saved_tensors(module: Any) -> Iterator[Any]:
    """Yield the tensors that the `state_dict` of a module has."""
    yield from module.parameters()
    for _, inner in named_modules(module, ""):
        hidden = inner._non_persistent_buffers_set
        yield from (tensor for key, tensor in inner._buffers.items() if tensor is not None and key not in hidden)


def modes_of(named: Named) -> list[Any] | None:
    """Return whether a module is in training mode, and the paths of the modules inside that are in the other one."""
    if not named:
        return None
    training = named[0][1].training
    return [training, [path for path, one in named if one.training != training]]
