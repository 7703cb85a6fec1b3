"""Ends parts of an earlier stack on the same data folder that outlived their supervisor.

The kernel sends every part SIGTERM when its supervisor dies. A part that is stopped (SIGSTOP) at that moment does not
handle the signal until it is continued. Until then it keeps its port, and the new part cannot start.
"""

import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from infra.errors import StackError
from infra.files import write_private

_log = logging.getLogger(__name__)
_GRACE_S = 10.0
"""Time for the processes to end after SIGTERM, before SIGKILL."""
_KILLED_S = 10.0


@dataclass(frozen=True)
class PartIdentity:
    """The unique identity of the process of a part: pid, start time and boot id. A pid alone can be reused."""

    pid: int
    start_ticks: int
    """Start time, in clock ticks since boot."""
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> "PartIdentity | None":
        """Returns the identity of a running process, or None if no process has this pid."""
        try:
            state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return None
        return None if state in "ZX" else cls(pid, int(fields[18]), boot_id)


def record(path: Path, pids: Iterable[int]) -> None:
    """Writes the identities of the stack's processes to `path`. An error, such as a full disk, is only logged."""
    known = (PartIdentity.of(pid) for pid in pids)
    try:
        write_private(path, json.dumps([asdict(identity) for identity in known if identity is not None]))
    except OSError as error:
        _log.warning("%s: cannot be written: %s", path, error.strerror)


def end_recorded(path: Path) -> None:
    """Ends the processes that an earlier supervisor recorded and that still run. Blocks until they have ended.

    Raises:
        StackError: a process does not end even after SIGKILL.
    """
    try:
        recorded = [PartIdentity(**body) for body in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError):
        return  # No record, or a damaged one. A remaining part is then detected because its port is in use.
    began_s = time.monotonic()
    told = killed = False
    while left := [identity for identity in recorded if PartIdentity.of(identity.pid) == identity]:
        passed_s = time.monotonic() - began_s
        if passed_s > _GRACE_S + _KILLED_S:
            raise StackError(f"process {left[0].pid} of an earlier run does not end; stop it first")
        if not told:
            told = True
            _log.warning("ending processes %s of an earlier run", [identity.pid for identity in left])
            _send(left, signal.SIGTERM)
            _send(left, signal.SIGCONT)
        elif passed_s > _GRACE_S and not killed:
            killed = True
            _send(left, signal.SIGKILL)
        time.sleep(0.05)


def _send(processes: Iterable[PartIdentity], number: int) -> None:
    for identity in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(identity.pid, number)
