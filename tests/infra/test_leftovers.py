"""Child processes that outlived their supervisor, with real processes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.stack import leftovers
from infra.stack.leftovers import PartIdentity
from infra.stack.ports import require_free
from infra.stack.supervisor import Child, Supervisor, dies_with_parent

_SERVER = (
    "import signal, socket, sys\n"
    "server = socket.create_server(('127.0.0.1', 0))\n"
    "print(server.getsockname()[1], flush=True)\n"
    "signal.pause()\n"
)


@pytest.fixture
def deaf() -> Iterator[subprocess.Popen[bytes]]:
    """Yields a process that ignores SIGTERM."""
    command = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield process
        process.kill()


def test_a_part_that_was_stopped_when_its_supervisor_died_is_ended_by_the_next(tmp_path: Path) -> None:
    """A server under SIGSTOP keeps its port after the supervisor's SIGKILL; the next supervisor frees it."""
    parts, log = tmp_path / "parts.json", tmp_path / "part.log"
    script = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from infra.stack.supervisor import Child, Supervisor, dies_with_parent\n"
        "async def main():\n"
        f"    supervisor = Supervisor(parts=Path({str(parts)!r}))\n"
        f"    command = [*dies_with_parent(), sys.executable, '-c', {_SERVER!r}]\n"
        f"    await supervisor.start(Child('part', command, Path({str(log)!r})))\n"
        "    print(supervisor.children[0].process.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        part = int(supervisor.stdout.readline())
        while not log.read_text():
            assert supervisor.poll() is None
        os.kill(part, signal.SIGSTOP)
        while " T " not in Path(f"/proc/{part}/stat").read_text():  # Before that it would handle the SIGTERM.
            assert supervisor.poll() is None
        supervisor.kill()
    port = int(log.read_text())
    with pytest.raises(Exception, match="is in use"):
        require_free("api.port", "127.0.0.1", port)
    leftovers.end_recorded(parts)
    require_free("api.port", "127.0.0.1", port)
    leftovers.end_recorded(parts)  # A second call has no effect.


def test_one_that_does_not_listen_is_killed(
    deaf: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that still runs after its grace period is killed with SIGKILL."""
    monkeypatch.setattr(leftovers, "_GRACE_S", 0.3)
    leftovers.record(tmp_path / "parts.json", [deaf.pid])
    leftovers.end_recorded(tmp_path / "parts.json")
    assert deaf.wait(10) == -signal.SIGKILL


def test_who_has_the_same_number_but_is_another_process_is_left_alone(
    deaf: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """A process that has reused a recorded pid, for example after a reboot, is left alone."""
    identity = PartIdentity.of(deaf.pid)
    assert identity is not None
    path = tmp_path / "parts.json"
    for other in ({"start_ticks": identity.start_ticks - 1}, {"boot_id": "another"}):
        path.write_text(json.dumps([{**identity.__dict__, **other}]))
        leftovers.end_recorded(path)
    assert deaf.poll() is None


@pytest.mark.parametrize("damaged", ["", "[", "{}", '[{"pid": 1}]', '[["x"]]', '"x"'])
def test_a_damaged_record_ends_nothing(damaged: str, tmp_path: Path) -> None:
    """A damaged record ends no process and raises no error, and neither does a missing one."""
    path = tmp_path / "parts.json"
    leftovers.end_recorded(path)
    path.write_text(damaged)
    leftovers.end_recorded(path)


def test_a_record_that_cannot_be_written_keeps_no_part_from_being_started(tmp_path: Path) -> None:
    """A child process is started even if the record cannot be written, for example on a full disk."""

    async def run() -> None:
        supervisor = Supervisor(parts=tmp_path / "not-there" / "parts.json")
        try:
            await supervisor.start(Child("part", [*dies_with_parent(), "sleep", "600"], tmp_path / "part.log"))
            assert supervisor.children[0].is_running()
        finally:
            await supervisor.stop()

    asyncio.run(run())
