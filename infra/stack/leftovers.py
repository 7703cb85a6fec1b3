"""Parts of a stack that outlived their supervisor: found by the next one on the same folder, and ended.

The kernel sends every part SIGTERM when its supervisor dies. A part that is stopped (SIGSTOP) at that moment does not
receive the signal until it is continued. Until then it keeps its port, and its successor cannot start.
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
"""What ends by itself has this long."""
_KILLED_S = 10.0


@dataclass(frozen=True)
class Identity:
    """One process, by what no other one of any boot shares."""

    pid: int
    start_ticks: int
    """Since boot."""
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> "Identity | None":
        """That of a process that runs; None: there is none."""
        try:
            state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return None
        return None if state in "ZX" else cls(pid, int(fields[18]), boot_id)


def record(path: Path, pids: Iterable[int]) -> None:
    """Writes down which processes are a stack's parts. A disk that is full keeps no part from being started."""
    known = (Identity.of(pid) for pid in pids)
    try:
        write_private(path, json.dumps([asdict(identity) for identity in known if identity is not None]))
    except OSError as error:
        _log.warning("%s: %s", path, error.strerror)


def end_recorded(path: Path) -> None:
    """Ends the processes that an earlier supervisor recorded and that still run. Blocks until they are gone.

    Raises:
        StackError: one does not end, even by SIGKILL.
    """
    try:
        recorded = [Identity(**body) for body in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError):
        return  # None were, or the record is damaged: then a part that is left shows by its port.
    began_s = time.monotonic()
    told = killed = False
    while left := [identity for identity in recorded if Identity.of(identity.pid) == identity]:
        passed_s = time.monotonic() - began_s
        if passed_s > _GRACE_S + _KILLED_S:
            raise StackError(f"process {left[0].pid} is left of an earlier run, and does not end; stop it first")
        if not told:
            told = True
            _log.warning("ending what is left of an earlier run: processes %s", [identity.pid for identity in left])
            _send(left, signal.SIGTERM)
            _send(left, signal.SIGCONT)
        elif passed_s > _GRACE_S and not killed:
            killed = True
            _send(left, signal.SIGKILL)
        time.sleep(0.05)


def _send(processes: Iterable[Identity], number: int) -> None:
    for identity in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(identity.pid, number)
