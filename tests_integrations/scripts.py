"""Runs training scripts in forked children, which can be killed or signalled at a chosen step."""

import io
import json
import logging
import os
import pickle
import selectors
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from mizzen import Checkpointer
from mizzen.checkpoint import CheckpointWarning


@dataclass(frozen=True)
class Ended:
    """The exit code and the output of a child."""

    code: int
    """The exit code, or the negative signal number."""
    output: str


@dataclass(frozen=True)
class Signal:
    """A signal that a child sends to itself."""

    number: signal.Signals
    at_step: int
    """The signal is sent right after this step of the first optimizer, counted from 1 in this process."""


@dataclass(frozen=True)
class Aim:
    """A SIGKILL that a child sends to itself right before a file operation, or within the life of an iterator."""

    kind: str
    """The kind of the operation, with the top-level folder, as counted in `TOUCHES`: "os.remove ckpt"; or one of
    `restored` (at the end of a restore), `iterating` (a loader's iterator was created) and `iterated` (it has ended).
    """
    number: int
    """The number of the operation among those of its kind, from 1."""


TOUCHES = "touches.json"
"""The file to which a child that is not killed writes its number of file operations by kind (see `Aim`)."""


def start(script: Path, folder: Path, told: "Signal | Aim | None" = None, **variables: str) -> int:
    """Starts a script in a forked child, in `folder`. Returns the pid. The output goes to `folder/output.<pid>`."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    module = sys.modules["__main__"] = ModuleType("__main__")
    vars(module)["__file__"] = str(script)
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.chdir(folder)
        handle = os.open(f"output.{os.getpid()}", os.O_WRONLY | os.O_CREAT)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        # By line, so that a kill loses no warning.
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        sys.argv = [str(script)]
        os.environ.update(variables)
        torch.set_num_threads(1)
        # The parent may ignore warnings, or pytest may record them.
        warnings.showwarning = _show
        warnings.filterwarnings("always", category=CheckpointWarning)
        # What the analysis of a script cannot read is a failure here.
        log = logging.getLogger("mizzen.checkpoint.lost_positions")
        log.addHandler(logging.StreamHandler(sys.stderr))
        log.handlers[-1].setFormatter(logging.Formatter("CheckpointWarning: %(message)s"))
        log.setLevel(logging.DEBUG)
        if isinstance(told, Signal):
            _arrange(told)
        touched = _touches(folder, told if isinstance(told, Aim) else None)
        # Keep the script's variables until the end: torch 2.13 can hang when the last objects of a gang are destroyed.
        exec(compile(script.read_text(), str(script), "exec"), vars(module))
        (folder / TOUCHES).write_text(json.dumps(touched))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Skip all exit handlers: pytest's must not run in the child.
        os._exit(code)
    raise AssertionError("unreachable")


def _show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
    print(f"{filename}:{lineno}: {category.__name__}: {message}", file=sys.stderr)


def _arrange(told: Signal) -> None:
    steps = 0
    first = None

    def count(optimizer: torch.optim.Optimizer, *_: object) -> None:
        nonlocal steps, first
        first = optimizer if first is None else first
        steps += optimizer is first
        if steps == told.at_step and optimizer is first:
            os.kill(os.getpid(), told.number)

    register_optimizer_step_post_hook(count)


def _touches(folder: Path, aim: Aim | None) -> dict[str, int]:
    """Counts the operations of this process (see `Aim`), files only below `folder`. Kills the process at `aim`."""
    counts: dict[str, int] = {}
    prefix = f"{folder.resolve()}/"
    pid = os.getpid()

    def count(kind: str) -> None:
        counts[kind] = counts.get(kind, 0) + 1
        if aim is not None and kind == aim.kind and counts[kind] == aim.number and os.getpid() == pid:
            os.kill(pid, signal.SIGKILL)

    def touched(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _TOUCHING or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path = os.fsdecode(arguments[0])
        path = path if path.startswith("/") else prefix + path
        if not path.startswith(prefix) or "/" not in path.removeprefix(prefix):
            return
        count(f"{event} {path.removeprefix(prefix).partition('/')[0]}")

    sys.addaudithook(touched)
    _watch_iterators(count)
    return counts


def _watch_iterators(count: Callable[[str], None]) -> None:
    """Calls `count` when a restore ends, and when an iterator of a loader is created and has ended."""
    restore, create, following = Checkpointer.restore, _BaseDataLoaderIter.__init__, _BaseDataLoaderIter.__next__

    def restored(self: Any, *arguments: Any, **options: Any) -> int:
        step = restore(self, *arguments, **options)
        count("restored")
        return step

    def created(self: Any, *arguments: Any) -> None:
        create(self, *arguments)
        count("iterating")

    def next_batch(self: Any) -> Any:
        try:
            return following(self)
        except StopIteration:
            count("iterated")
            raise

    Checkpointer.restore = restored  # type: ignore[method-assign]
    _BaseDataLoaderIter.__init__ = created  # type: ignore[method-assign]
    _BaseDataLoaderIter.__next__ = next_batch  # type: ignore[method-assign]


_TOUCHING = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "shutil.rmtree", "os.scandir"}


def end(pid: int, folder: Path) -> Ended:
    """Waits for a child, then kills its remaining processes, such as the workers of a loader, as an agent does."""
    status = 0
    try:
        _, status = os.waitpid(pid, 0)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    output = folder / f"output.{pid}"
    return Ended(os.waitstatus_to_exitcode(status), output.read_text(errors="replace") if output.exists() else "")


def _kill(pids: set[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _first_ended(pids: set[int]) -> int:
    """Waits until one of these children has ended, and leaves it to be waited for."""
    with ExitStack() as opened, selectors.DefaultSelector() as selector:
        for pid in pids:
            descriptor = os.pidfd_open(pid)
            opened.callback(os.close, descriptor)
            selector.register(descriptor, selectors.EVENT_READ, pid)
        return int(selector.select()[0][0].data)


def run(script: Path, folder: Path, told: Signal | Aim | None = None, **variables: str) -> Ended:
    """Runs a script in a child until it ends."""
    folder.mkdir(exist_ok=True, parents=True)
    return end(start(script, folder, told, **variables), folder)


def run_gang(
    script: Path, folder: Path, told: Mapping[int, Signal | Aim] | None = None, world_size: int = 2, **variables: str
) -> list[Ended]:
    """Runs a script as the ranks of a gang. If one rank is killed, the others are killed too, as a scheduler does."""
    folder.mkdir(exist_ok=True, parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    gang = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **variables}
    ranks = range(world_size)
    pids = [start(script, folder, (told or {}).get(r), RANK=str(r), LOCAL_RANK=str(r), **gang) for r in ranks]
    ended: dict[int, Ended] = {}
    try:
        while len(ended) < world_size:
            pid = _first_ended(set(pids) - set(ended))
            ended[pid] = end(pid, folder)
            if ended[pid].code < 0:
                _kill(set(pids) - set(ended))
    finally:
        _kill(set(pids) - set(ended))
    return [ended[pid] for pid in pids]


class _Values(pickle.Pickler):
    """Pickles values only. `torch.save` also writes which texts are one object: not if a checkpoint was loaded."""

    def persistent_id(self, obj: object) -> object:
        if not isinstance(obj, torch.Tensor):
            return None
        return str(obj.dtype), tuple(obj.shape), obj.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def values(path: Path) -> bytes:
    """Returns the values in a file of `torch.save`, as bytes that are equal if the values are."""
    pickler = _Values(found := io.BytesIO())
    pickler.fast = True  # Equal objects are written each time.
    pickler.dump(torch.load(path, weights_only=False))
    return found.getvalue()
