"""A disk that promises what POSIX does and no more, and the states that it may be in after a loss of power.

- Of a file's content, what was written before its last fsync; a write after that is there, missing, torn, or zeros,
  each by itself.
- Of a folder's names, what was so at its last fsync; each name that changed after that, by creation, link, renaming or
  removal, is in any of the states that it had since, whatever the other names are in. A renaming is a removal in one
  folder and a creation in the other, and each may be missing.

A crash is an instant between two operations and a choice for each thing that is not promised.
"""

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.disk_recording import Mutation

Pick = Callable[[int], int]
"""Chooses a number below its argument. 0 is the promised state, the greatest what happened."""
Tree = dict[str, bytes | None]
"""Path to content; None: a folder."""


@dataclass
class _File:
    durable: bytes = b""
    pending: list[bytes] = field(default_factory=list)


@dataclass
class _Folder:
    names: dict[str, list[Any]] = field(default_factory=dict)
    """Name to the things it stood for since the folder's last fsync: the first one is promised, the last is so now."""

    def set(self, name: str, thing: Any) -> None:
        self.names.setdefault(name, [None]).append(thing)

    def now(self, name: str) -> Any:
        return self.names[name][-1]


class Disk:
    """A disk to which recorded operations are done one by one. The base folder itself is there for good."""

    def __init__(self) -> None:
        self._base = _Folder()
        self._things: dict[int, Any] = {}

    def _parent(self, path: str) -> tuple[_Folder, str]:
        folder = self._base
        *above, name = path.split("/")
        for part in above:
            folder = folder.now(part)
        return folder, name

    def do(self, mutation: Mutation) -> None:
        """One more operation."""
        match mutation:
            case ("create" | "mkdir" as kind, path, number):
                # Numbers are used again by later files.
                self._things[number] = _File() if kind == "create" else _Folder()
                folder, name = self._parent(path)
                folder.set(name, self._things[number])
            case ("write", number, data):
                self._things[number].pending.append(data)
            case ("fsync", number):
                self._sync(self._things.get(number, self._base))
            case ("link", _, path, number):
                folder, name = self._parent(path)
                folder.set(name, self._things[number])
            case ("replace", source, path, number):
                folder, name = self._parent(source)
                folder.set(name, None)
                folder, name = self._parent(path)
                folder.set(name, self._things[number])
            case ("unlink" | "rmdir", path, _):
                folder, name = self._parent(path)
                folder.set(name, None)
            case _:
                raise ValueError(f"{mutation}: an operation that is not modelled")

    def _sync(self, thing: Any) -> None:
        if isinstance(thing, _File):
            thing.durable += b"".join(thing.pending)
            thing.pending.clear()
        else:
            thing.names = {name: [states[-1]] for name, states in thing.names.items() if states[-1] is not None}

    def loose(self) -> int:
        """How many choices a crash now has."""
        return sum(1 for _ in self._choices(self._base))

    def _choices(self, folder: _Folder) -> Iterator[None]:
        for states in folder.names.values():
            if len(states) > 1:
                yield None
            if isinstance(states[-1], _Folder):
                yield from self._choices(states[-1])

    def crash(self, pick: Pick) -> Tree:
        """What is there after a crash now."""
        tree: Tree = {}
        files: dict[int, bytes] = {}

        def walk(folder: _Folder, prefix: str) -> None:
            for name, states in sorted(folder.names.items()):
                thing = states[pick(len(states)) if len(states) > 1 else 0]
                if isinstance(thing, _Folder):
                    tree[prefix + name] = None
                    walk(thing, f"{prefix}{name}/")
                elif thing is not None:
                    if id(thing) not in files:
                        files[id(thing)] = thing.durable + _torn(thing.pending, pick)
                    tree[prefix + name] = files[id(thing)]

        walk(self._base, "")
        return tree


def _torn(pending: Sequence[bytes], pick: Pick) -> bytes:
    content = b""
    for data in pending:
        match pick(5):
            case 0:
                # The file ends here: nothing of a later write can be known to be there.
                return content
            case 1:
                return content + data[: pick(len(data)) if data else 0]
            case 2:
                content += bytes(len(data))
            case 3:
                half = len(data) // 2
                content += bytes(half) + data[half:]
            case _:
                content += data
    return content


def everything(count: int) -> int:
    """All that was done is there."""
    return count - 1


def nothing(_: int) -> int:
    """Only what is promised is there."""
    return 0


def biased(rng: random.Random, share: float) -> Pick:
    """Each thing is as it is now with this probability, else in any state."""
    return lambda count: count - 1 if rng.random() < share else rng.randrange(count)


def all_but(index: int, rest: Pick, other: Pick) -> Pick:
    """The choice of that index is made by `other`."""
    made = iter(range(1 << 30))
    return lambda count: other(count) if next(made) == index else rest(count)


def crashes(disk: Disk, rng: random.Random, randoms: int) -> Iterator[Tree]:
    """States after a crash now, each once: the extremes, each thing alone lost or kept, and random ones."""
    loose = disk.loose()
    picks: list[Pick] = [everything, nothing]
    picks += [all_but(index, everything, nothing) for index in range(loose)]
    picks += [all_but(index, nothing, everything) for index in range(loose)]
    picks += [biased(rng, rng.choice((0.1, 0.5, 0.9))) for _ in range(randoms if loose else 0)]
    known = set()
    for pick in picks:
        tree = disk.crash(pick)
        mark = hash(tuple(tree.items()))
        if mark not in known:
            known.add(mark)
            yield tree


def materialise(tree: Tree, base: Path) -> None:
    """Make the state anew in `base`."""
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir(parents=True)
    for path, content in tree.items():
        if content is None:
            (base / path).mkdir()
        else:
            (base / path).write_bytes(content)
