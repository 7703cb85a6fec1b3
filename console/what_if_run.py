"""A simulation of the live system with a change, in a process of its own (`mizzen what-if`): one at a time.

The process has limits of CPU time, memory and wall time, a low priority, and ends with the process of the API.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from infra import children
from simulation.difference import differences, pairs

CPU_S, WALL_S, MEMORY_BYTES = 900, 1800, 4 << 30
"""Limits of a simulation."""
_LAST_BYTES = 2000
_CHILD = f"""
import os, resource, runpy, signal, threading
resource.setrlimit(resource.RLIMIT_CPU, ({CPU_S}, {CPU_S + 5}))
resource.setrlimit(resource.RLIMIT_DATA, ({MEMORY_BYTES}, {MEMORY_BYTES}))
signal.alarm({WALL_S})
os.nice(10)
threading.Thread(target=lambda: os._exit(len(os.read(0, 1))), daemon=True).start()
runpy.run_module("server", run_name="__main__", alter_sys=True)
"""
"""Sets the limits, and ends when its standard input is closed: when the API ends, however it does. The death of the
parent's thread, which `PR_SET_PDEATHSIG` waits for, is no such sign: threads of requests end at any time."""


class SimulationRunsError(Exception):
    """Another simulation has not ended yet."""


@dataclass
class WhatIfRun:
    """One simulation. Its folder has the snapshot, the results and the errors, and is deleted with this object."""

    change: str
    """A description of the change for users."""
    asked_by: str
    folder: Path
    process: subprocess.Popen[bytes]
    asked_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    is_cancelled: bool = False

    def __post_init__(self) -> None:
        # Not earlier: a request may still read the files of a run that another one has replaced.
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    @property
    def has_ended(self) -> bool:
        """Whether the process of the simulation has ended."""
        return self.process.poll() is not None

    @property
    def progress(self) -> str:
        """The last line that the simulation has written."""
        with (self.folder / "errors").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.strip()), "")

    @property
    def error(self) -> str | None:
        """Why it ended without a result; None: it has a result, or still runs."""
        if not self.has_ended or (self.process.returncode == 0 and not self.is_cancelled):
            return None
        if self.is_cancelled:
            return "it was cancelled"
        if self.process.returncode == -signal.SIGXCPU:
            return f"it used more than {CPU_S // 60} minutes of CPU time: simulate fewer hours"
        if self.process.returncode == -signal.SIGALRM:
            return f"it took more than {WALL_S // 60} minutes: simulate fewer hours"
        return self.progress.removeprefix("mizzen: ") or f"its process ended with status {self.process.returncode}"

    def rows(self) -> list[list[str]]:
        """Returns the rows (policy, figure, unchanged, changed, difference) of a simulation that has succeeded."""
        outcomes: list[dict[str, Any]] = json.loads((self.folder / "outcomes.json").read_text())
        return [row for before, after in pairs(outcomes) for row in differences(before, after)]

    def report(self) -> bytes | None:
        """Returns the HTML report of a simulation that has succeeded."""
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / "report.html").read_bytes()
        return None

    def cancel(self) -> None:
        """Ends the process."""
        if not self.has_ended:
            self.is_cancelled = True
            self.process.kill()
            self.process.wait()

    def close(self) -> None:
        """Ends the process, and closes its input."""
        self.cancel()
        self.process.stdin.close()  # type: ignore[union-attr]


class WhatIfRuns:
    """The newest simulation of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.newest: WhatIfRun | None = None

    def start(self, change: str, asked_by: str, snapshot: bytes, arguments: Sequence[str]) -> WhatIfRun:
        """Starts a simulation in place of the one before.

        Args:
            change: what is different, for people.
            asked_by: the name of the key.
            snapshot: a snapshot of the live system as JSON.
            arguments: options of `mizzen what-if`.

        Raises:
            SimulationRunsError: another simulation has not ended.
        """
        with self._lock:
            if self.newest is not None:
                if not self.newest.has_ended:
                    raise SimulationRunsError(self.newest.change)
                self.newest.close()
                self.newest = None
            folder = Path(tempfile.mkdtemp(prefix="mizzen-what-if-"))
            (folder / "snapshot.json").write_bytes(snapshot)
            files = ["--json", str(folder / "outcomes.json"), "--report", str(folder / "report.html")]
            command = children.python("-c", _CHILD, "what-if", str(folder / "snapshot.json"), *arguments, *files)
            with (folder / "errors").open("wb") as errors:
                process = subprocess.Popen(
                    command, cwd=folder, env=children.environment(), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                    stderr=errors, start_new_session=True,
                )  # fmt: skip
            self.newest = WhatIfRun(change, asked_by, folder, process)
            return self.newest
