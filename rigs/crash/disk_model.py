"""A model of a disk with only the guarantees of POSIX, and of its possible states after a power loss.

- File content: writes before the file's last fsync are durable. Each later write is, independently of the others,
  complete, missing, torn, or replaced by zeros.
- Folder entries: the entries at the folder's last fsync are durable. Each name that was created, linked, renamed or
  removed later is, independently of the others, in any of the states that it had since. A rename is a removal in one
  folder and a creation in another, and each of them may be missing.

A crash is a point between two operations, and a choice for each state that is not durable.
"""

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rigs.crash.disk_recording import Mutation

Pick = Callable[[int], int]
"""Chooses a number below its argument: 0 is the durable state, the largest number is the latest state."""
Tree = dict[str, bytes | None]
"""The content of each path; None: a folder."""


@dataclass
class _File:
    durable: bytes = b""
    pending: list[bytes] = field(default_factory=list)


@dataclass
class _Folder:
    names: dict[str, list[Any]] = field(default_factory=dict)
    """States of each name since the folder's last fsync: the first is durable, the last is current."""

    def set(self, name: str, thing: Any) -> None:
        self.names.setdefault(name, [None]).append(thing)

    def now(self, name: str) -> Any:
        return self.names[name][-1]


class Disk:
    """A disk on which recorded operations are replayed one by one. The base folder itself is always durable."""

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
        """Replays one operation."""
        match mutation:
            case ("create" | "mkdir" as kind, path, number):
                # Inode numbers are reused by later files.
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
                raise ValueError(f"{mutation}: this operation is not modelled")

    def _sync(self, thing: Any) -> None:
        if isinstance(thing, _File):
            thing.durable += b"".join(thing.pending)
            thing.pending.clear()
        else:
            thing.names = {name: [states[-1]] for name, states in thing.names.items() if states[-1] is not None}

    def loose(self) -> int:
        """Returns the number of names whose state after a crash is undetermined."""
        return sum(1 for _ in self._choices(self._base))

    def _choices(self, folder: _Folder) -> Iterator[None]:
        for states in folder.names.values():
            if len(states) > 1:
                yield None
            if isinstance(states[-1], _Folder):
                yield from self._choices(states[-1])

    def crash(self, pick: Pick) -> Tree:
        """Returns the files and folders after a crash at this point; `pick` makes the choices."""
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
                # The file ends here: this write and all later ones are missing.
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
    """Chooses the latest state: nothing is lost."""
    return count - 1


def nothing(_: int) -> int:
    """Chooses the durable state: everything else is lost."""
    return 0


def biased(rng: random.Random, share: float) -> Pick:
    """Chooses the latest state with probability `share`, else a random state."""
    return lambda count: count - 1 if rng.random() < share else rng.randrange(count)


def all_but(index: int, rest: Pick, other: Pick) -> Pick:
    """Makes the choice number `index` with `other`, and all other choices with `rest`."""
    made = iter(range(1 << 30))
    return lambda count: other(count) if next(made) == index else rest(count)


def crashes(disk: Disk, rng: random.Random, randoms: int) -> Iterator[Tree]:
    """Yields distinct states after a crash: all lost, all kept, each name alone lost or kept, and random ones."""
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
    """Recreates a state in the folder `base`."""
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir(parents=True)
    for path, content in tree.items():
        if content is None:
            (base / path).mkdir()
        else:
            (base / path).write_bytes(content)
