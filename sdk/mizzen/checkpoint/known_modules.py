"""The modules of a tracked torch module at the restore: a save compares them in a microsecond for each module."""

from collections.abc import Set
from operator import attrgetter, is_
from typing import Any


class KnownModules:
    """A module and those inside. Modules that are the same objects need not be listed again."""

    def __init__(self, pairs: list[tuple[str, Any]], excluded: Set[str]) -> None:
        """Compares nothing yet.

        Args:
            pairs: the modules, with their paths.
            excluded: the names of attributes that need not be compared.
        """
        self.pairs = pairs
        self.mutable: list[tuple[str, Any]] = []
        """Those in which something may change while their attributes are the same objects."""
        self._inner = _Values([one._modules for _, one in pairs], frozenset())
        self._attributes = _Values([vars(one) for _, one in pairs], excluded)
        self._training = self._trained()

    def are_same(self) -> bool:
        """Return whether the modules are the same objects."""
        return self._inner.are_same()

    def suspects(self, now: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
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
