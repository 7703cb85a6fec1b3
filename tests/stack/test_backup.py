"""A stack is backed up while it runs, killed, and restored in another folder, where its workloads continue."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.stack.harness import Up, processes_of, wait_until


class _Restored(Up):
    """A stack in a restored folder, with the settings of the backup."""

    def command(self) -> list[str]:
        """Returns the command line that the restoration printed, with a free port."""
        return [str(self.bin / "mizzen"), "up", "--config", str(self.data / "settings.yaml"), "--port", str(self.port)]

    def start_held(self) -> None:
        """Starts the stack and waits until it is held."""
        log = self.folder / "up.log"
        with log.open("a") as file:
            self.process = subprocess.Popen(self.command(), stdout=file, stderr=file, text=True, start_new_session=True)
        wait_until(lambda: "HELD" in log.read_text(), "the restored stack is held")


def _mizzen(up: Up, *arguments: str | Path) -> str:
    command = [str(up.bin / "mizzen"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_restored_stack_continues_the_workloads_when_it_is_adopted(up: Up, tmp_path: Path) -> None:
    """No acknowledged workload is lost; until the adoption nothing runs in the copy; secrets stay readable."""
    up.start()
    up.client().set_tenant("t", 3, {"a100": 16}, None)
    up.client().set_secret("t", "token", "s3cret")
    gate = tmp_path / "gate"
    finished = up.submit("finished", 1, 0.01)
    wait_until(lambda: up.ended(finished), "a workload ends")
    running = [up.submit(f"running-{n}", 1, 0.01, tasks=8, gate=gate) for n in range(2)]  # All GPUs.
    wait_until(lambda: all(up.phase(one) == "running" for one in running), "they run")
    waiting = [up.submit(f"waiting-{n}", 1, 0.01, gate=gate) for n in range(3)]
    said = _mizzen(up, "backup", tmp_path / "b.zip", "--data-dir", up.data, "--keys")
    assert "what was acknowledged until" in said
    shutil.copytree(up.data / "buckets", tmp_path / "buckets")  # As the operator's backup of the buckets.
    _kill(up)

    there = _Restored(tmp_path / "there")
    try:
        _mizzen(up, "restore", tmp_path / "b.zip", "--data-dir", there.data)
        shutil.copytree(tmp_path / "buckets", there.data / "buckets")
        there.start_held()
        time.sleep(3)
        roles = [command for command in processes_of(there.data).values() if " -m server " in command]
        assert [command.split(" -m server ")[1].split()[0] for command in roles] == ["api"]
        assert {there.phase(one) for one in waiting} == {"pending"}
        assert httpx.get(f"http://127.0.0.1:{there.port}/readyz").json()["held"] is True
        gate.touch()
        assert "adopted" in _mizzen(up, "adopt", "--data-dir", there.data)
        there.await_machines()
        for workload in (*running, *waiting):
            wait_until(lambda workload=workload: there.ended(workload), f"{workload} ends", 180.0)
        assert there.phase(finished) == "succeeded"
        assert there.client().secrets("t") == ["token"]
        assert there.interrupt() == 0
        assert processes_of(there.data) == {}
    finally:
        there.close()


def _kill(up: Up) -> None:
    """Kills all processes of a stack, also its tasks, as the loss of its computer does."""
    assert up.process is not None
    while found := {*processes_of(up.data), *([up.process.pid] if up.process.poll() is None else [])}:
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)
