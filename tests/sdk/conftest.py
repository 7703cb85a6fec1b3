"""Fixtures of the SDK's tests: a clean environment, and children that are killed or frozen at a file operation."""

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from mizzen import report
from tests.buckets import gcs_endpoint, gcs_url, s3_endpoint, s3_url
from tests.sdk.full_disks import disk

__all__ = ["disk", "gcs_endpoint", "gcs_url", "s3_endpoint", "s3_url"]

_TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
_FILE_EVENTS = ("open", "os.", "fcntl.", "shutil.")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Removes the variables of a scheduler from the environment, and restores the SIGTERM handler afterwards."""
    for name in list(os.environ):
        if name.startswith("MIZZEN_") or name in _TOLD:
            monkeypatch.delenv(name)
    # The platform is not detected, so no metadata server receives a request.
    monkeypatch.setenv("MIZZEN_PLATFORM", "sigterm")
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def under_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Returns what an agent does at a notice of some seconds: it writes the deadline and sends SIGTERM."""
    # Other tests of this process may have got notices.
    watching = sys.modules["mizzen.notices.current_notice"]
    for name, unset in {"_signalled": None, "_noticed": False, "_watcher": None, "_fallback": None}.items():
        monkeypatch.setattr(watching, name, unset)
    monkeypatch.setattr(report._process, "__dict__", vars(report.Reporter()))
    file = tmp_path / "deadline.json"
    for name, value in {
        "MIZZEN_PLATFORM": "mizzen", "MIZZEN_GRACE_S": "600", "MIZZEN_DEADLINE_FILE": str(file),
        "MIZZEN_REPORT": str(tmp_path / "report.json"), "MIZZEN_CHECKPOINT_INTERVAL_S": "3600",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)

    def give(left_s: float) -> None:
        file.write_text(json.dumps({"deadline_boot_s": time.clock_gettime(time.CLOCK_BOOTTIME) + left_s}))
        os.kill(os.getpid(), signal.SIGTERM)

    return give


@dataclass
class Child:
    """A forked process, and the pipe on which it reports its progress."""

    pid: int
    pipe: int

    def wait_stopped(self) -> bool:
        """Waits until the process is frozen (True) or has ended (False)."""
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        self._status = status
        return os.WIFSTOPPED(status)

    def end(self) -> int:
        """Waits until the process ends; returns its exit code, or the negative number of the signal."""
        status = getattr(self, "_status", None)
        if status is None or os.WIFSTOPPED(status):
            _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def said(self) -> bytes:
        """Returns everything that the process wrote to its pipe before it ended."""
        with open(self.pipe, "rb") as pipe:
            return pipe.read()


Work = Callable[[Callable[[bytes], None]], None]


@pytest.fixture(name="fork")
def _fork() -> Callable[..., Child]:
    """Returns the function `fork`. Test modules cannot import it, because this module is a conftest."""
    return fork


def fork(work: Work, at_event: int = 0, sends: signal.Signals = signal.SIGKILL) -> Child:
    """Runs `work(tell)` in a child, which sends itself a signal before its `at_event`-th file operation (0: never)."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Newer Pythons warn about a fork in a multi-threaded process. The child uses no lock of another thread.
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

        os.fsync = audited_sync  # type: ignore[assignment]  # The only file operation without an audit event.
        sys.addaudithook(count)
        work(tell)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        # No code of pytest may run in the child.
        with suppress(Exception):
            os._exit(code)
    raise AssertionError("unreachable")
