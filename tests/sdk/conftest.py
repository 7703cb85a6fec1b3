"""What the SDK's tests share: a clean environment, and children that die or freeze at a chosen system call."""

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest

from tests.buckets import gcs_endpoint, gcs_url, s3_endpoint, s3_url

__all__ = ["gcs_endpoint", "gcs_url", "s3_endpoint", "s3_url"]

_TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
_FILE_EVENTS = ("open", "os.", "fcntl.", "shutil.")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable of a scheduler, and the SIGTERM handler as it was."""
    for name in list(os.environ):
        if name.startswith("MIZZEN_") or name in _TOLD:
            monkeypatch.delenv(name)
    # No server is asked where this machine is.
    monkeypatch.setenv("MIZZEN_PLATFORM", "sigterm")
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@dataclass
class Child:
    """A forked process, and the pipe on which it says how far it came."""

    pid: int
    pipe: int

    def wait_stopped(self) -> bool:
        """Wait until it is frozen (True) or has ended (False)."""
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        self._status = status
        return os.WIFSTOPPED(status)

    def end(self) -> int:
        """Wait for its end; its exit code, or minus the signal."""
        status = getattr(self, "_status", None)
        if status is None or os.WIFSTOPPED(status):
            _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def said(self) -> bytes:
        """All that it wrote to its pipe until its end."""
        with open(self.pipe, "rb") as pipe:
            return pipe.read()


Work = Callable[[Callable[[bytes], None]], None]


@pytest.fixture(name="fork")
def _fork() -> Callable[..., Child]:
    """The function `fork`, for tests: their modules cannot import this one by name."""
    return fork


def fork(work: Work, at_event: int = 0, sends: signal.Signals = signal.SIGKILL) -> Child:
    """Run `work(tell)` in a child, which sends itself a signal just before its `at_event`-th file operation, from 1."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Newer Pythons warn of forking beside other threads; the child uses nothing that such a one may hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        os.close(writer)
        return Child(pid, reader)
    code = 1
    try:
        os.close(reader)
        left = at_event

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            if left and event.startswith(_FILE_EVENTS):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), sends)

        sync = os.fsync

        def audited_sync(handle: int) -> None:
            sys.audit("os.fsync", handle)
            sync(handle)

        def tell(line: bytes) -> None:
            os.write(writer, line)

        os.fsync = audited_sync  # type: ignore[assignment]  # The one file operation without an event of its own.
        sys.addaudithook(count)
        work(tell)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        # Nothing of pytest's may run in the child.
        with suppress(Exception):
            os._exit(code)
    raise AssertionError("unreachable")
