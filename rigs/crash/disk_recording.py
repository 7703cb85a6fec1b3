"""Records this process's file operations below a folder, and simulates a kill between two operations."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Mutation = tuple[Any, ...]
"""An operation with its arguments, such as `("write", inode, data)` or `("link", source, target, inode)`."""

_DESCRIPTORS = ("/", "proc", "self", "fd")
_AUDITED = {"os.mkdir": "mkdir", "os.rmdir": "rmdir", "os.remove": "unlink", "os.link": "link", "os.rename": "rename"}


class Killed(BaseException):
    """Is raised by every operation on the folder after a simulated kill, so that no clean-up happens."""


@dataclass
class Recording:
    """The operations below a folder, in order, and the acknowledged saves."""

    base: Path
    mutations: list[Mutation] = field(default_factory=list)
    acknowledged: list[tuple[int, int]] = field(default_factory=list)
    """(number of earlier operations, step) of each acknowledged save."""
    kill_at: int | None = None
    """Index of the first operation that is not executed; None: no kill."""
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _inodes: dict[int, int] = field(default_factory=dict)
    _dead: bool = False

    def acknowledge(self, step: int) -> None:
        """Records that the save of `step` has returned."""
        self.acknowledged.append((len(self.mutations), step))

    def do(self, call: Callable[[], Any], note: Callable[[Any], Mutation | None]) -> Any:
        """Executes one operation, and records it.

        Raises:
            Killed: the simulated kill has happened.
        """
        with self._lock:
            if self._dead or (self.kill_at is not None and len(self.mutations) >= self.kill_at):
                self._dead = True
                raise Killed
            result = call()
            noted = note(result)
            if noted is not None:
                self.mutations.append(noted)
            return result

    def restart(self, kill_after: int | None = None) -> None:
        """Begins a new simulated process, to be killed after `kill_after` operations (None: not at all)."""
        self._dead = False
        self.kill_at = None if kill_after is None else len(self.mutations) + kill_after

    def below(self, path: Any, folder: int | None = None) -> str | None:
        """Returns the path relative to the base, an empty string for the base itself; None: it is outside the base.

        `folder`: the descriptor of the folder to which `path` is relative; None: the working directory. A path may also
        begin with a descriptor, as `/proc/self/fd/3/name`.
        """
        named = Path(path) if folder is None else Path(f"/proc/self/fd/{folder}", path)
        if len(named.parts) > 4 and named.parts[:4] == _DESCRIPTORS:
            opened = str(Path(*named.parts[:5]).readlink()).removesuffix(" (deleted)")
            named = Path(opened, *named.parts[5:])
        absolute = os.path.normpath(named.absolute())
        if absolute == str(self.base):
            return ""
        return os.path.relpath(absolute, self.base) if absolute.startswith(f"{self.base}/") else None


@contextmanager
def recording(base: Path) -> Iterator[Recording]:
    """Records the operations of this process below `base` that use the functions of `os`.

    Raises:
        AssertionError: an operation below `base` used another function.
    """
    recorder = Recording(base.absolute())
    real = {
        name: getattr(os, name) for name in ("open", "write", "fsync", "link", "replace", "unlink", "mkdir", "rmdir")
    }
    seen: list[str] = []
    live = True

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if not live or event not in _AUDITED:
            return
        folder = arguments[-1] if event in ("os.mkdir", "os.rmdir", "os.remove") and arguments[-1] != -1 else None
        if any(isinstance(each, str | os.PathLike) and recorder.below(each, folder) is not None for each in arguments):
            seen.append(_AUDITED[event])

    def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        name = recorder.below(path, dir_fd)
        if name is None:
            return int(real["open"](path, flags, mode, dir_fd=dir_fd))
        if not flags & os.O_CREAT:
            assert not flags & (os.O_TRUNC | os.O_APPEND), f"{path}: opened with flags that are not modelled"
            return int(recorder.do(lambda: real["open"](path, flags, mode, dir_fd=dir_fd), lambda _: None))
        assert flags & os.O_EXCL, f"{path}: created with flags that are not modelled"
        opened = recorder.do(
            lambda: real["open"](path, flags, mode, dir_fd=dir_fd), lambda made: ("create", name, os.fstat(made).st_ino)
        )
        return int(opened)

    def ours(descriptor: int) -> str | None:
        return recorder.below(f"/proc/self/fd/{descriptor}")

    def write(descriptor: int, data: Any) -> int:
        if ours(descriptor) is None:
            return int(real["write"](descriptor, data))
        number = os.fstat(descriptor).st_ino
        return int(
            recorder.do(lambda: real["write"](descriptor, data), lambda count: ("write", number, bytes(data)[:count]))
        )

    def fsync(descriptor: int) -> None:
        if ours(descriptor) is None:
            real["fsync"](descriptor)
            return
        number = os.fstat(descriptor).st_ino
        recorder.do(lambda: None, lambda _: ("fsync", number))

    def one(kind: str) -> Callable[..., None]:
        def call(path: Any, *arguments: Any, **named: Any) -> None:
            folder = named.get("dir_fd")
            name = recorder.below(path, folder)
            if name is None:
                real[kind](path, *arguments, **named)
                return

            def inode() -> int:
                return os.stat(path, dir_fd=folder, follow_symlinks=False).st_ino

            number = 0
            if kind != "mkdir":
                with suppress(FileNotFoundError):
                    number = inode()

            def noted(_: Any) -> Mutation:
                return (kind, name, inode() if kind == "mkdir" else number)

            recorder.do(lambda: real[kind](path, *arguments, **named), noted)

        return call

    def two(kind: str) -> Callable[..., None]:
        def call(source: Any, target: Any, **named: Any) -> None:
            names = recorder.below(source), recorder.below(target)
            if None in names:
                real[kind](source, target, **named)
                return
            recorder.do(lambda: real[kind](source, target, **named), lambda _: (kind, *names, os.lstat(target).st_ino))

        return call

    wrapped = {"open": open_, "write": write, "fsync": fsync}
    wrapped |= {kind: one(kind) for kind in ("unlink", "mkdir", "rmdir")}
    wrapped |= {kind: two(kind) for kind in ("link", "replace")}
    sys.addaudithook(audit)
    try:
        for name, function in wrapped.items():
            setattr(os, name, function)
        yield recorder
    finally:
        live = False
        for name, function in real.items():
            setattr(os, name, function)
    noted = [mutation[0].replace("replace", "rename") for mutation in recorder.mutations]
    for kind in _AUDITED.values():
        # Failed operations are audited too.
        assert noted.count(kind) <= seen.count(kind), f"{kind}: {noted.count(kind)} recorded, {seen.count(kind)} done"
