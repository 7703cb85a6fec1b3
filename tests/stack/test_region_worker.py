"""One region's worker stands still or dies, or its bucket goes away: the others' work starts meanwhile."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from infra.stack.ports import free_port
from tests.agent.harness import dev_server
from tests.stack.harness import ROOT, Up, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

_FLEET = """
version: 1
regions:
  - name: east
    clusters:
      - name: a
        machines: [{name: m, count: 1, gpus: 4, gpu_type: a100, cpus: 16, memory: 16GiB}]
"""
_MEANWHILE = 4
_SOON_S = 30.0
"""Twice this is the time for all of them. A bid without a deadline would be waited for 15 seconds each time."""


class West:
    """A second region: a worker and an agent of its own, which nothing starts again."""

    def __init__(self, up: Up, database: str, temporal: str) -> None:
        self._up = up
        self._flags = ["--config", str(up.folder / "config.yaml"), "--database", database, "--temporal", temporal]
        self.bucket = up.folder / "west-bucket"
        url = f"file://{self.bucket}"
        init = [sys.executable, "-m", "server", "init", *self._flags, "--data-dir", str(up.data)]
        subprocess.run([*init, "--region", f"west={url}"], cwd=ROOT, check=True, capture_output=True)
        self.worker = self.start_worker()
        self._agent = self._start(
            "agent", "--region", "west", "--cluster", "a", "--name", "m", "--bucket", url, "--gpus", "1", "--gpu-type",
            "a100", "--cpus", "2", "--memory", "2GiB", "--state-dir", str(up.folder / "agent"),
            "--ports", "21000-21099",
        )  # fmt: skip

    def start_worker(self) -> "subprocess.Popen[bytes]":
        """Starts the region's worker."""
        self.worker = self._start("worker", "--role", "region", "--region", "west")
        return self.worker

    def _start(self, *command: str) -> "subprocess.Popen[bytes]":
        with (self._up.folder / f"west-{command[0]}.log").open("ab") as log:
            whole = [sys.executable, "-m", "server", *command, *self._flags]
            return subprocess.Popen(whole, cwd=ROOT, stdout=log, stderr=log)

    def close(self) -> None:
        """Ends both."""
        for process in (self.worker, self._agent):
            process.kill()
            process.wait()


@pytest.fixture
def regions(tmp_path: Path, postgres_url: str) -> Iterator[tuple[Up, West]]:
    """A stack whose worker serves the east, and the west with a worker of its own."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("create database region_worker")
    database = postgres_url.rsplit("/", 1)[0] + "/region_worker"
    port = free_port()
    with dev_server(port):
        up = Up(tmp_path / "up", _FLEET, database=database, temporal=f"127.0.0.1:{port}")
        config = up.folder / "config.yaml"
        config.write_text(config.read_text() + "buckets: {interval_s: 0.5, retry_s: 0.5, retry_max_s: 1}\n")
        west = None
        try:
            up.start()
            west = West(up, database, f"127.0.0.1:{port}")
            up.client().set_tenant("t", 3, {"a100": 99}, None)
            wait_until(lambda: "west/a/m" in up.ready_machines(), "the west's machine is ready")
            yield up, west
        finally:
            if west is not None:
                west.close()
            up.close()


def _submitted(up: Up, mark: Path, **more: object) -> str:
    """A workload whose task makes the file `mark`; its id."""
    resources = {"accelerators": "a100:1", "cpus": 0.1, "memory": "64MiB"}
    job = {"name": "mark", "tasks": 1, "resources": resources, "run": f'touch "{mark}"'}
    return str(up.client().submit({"version": 1, "name": mark.name, "tenant": "t", "jobs": [job], **more})["id"])


def test_one_regions_failure_is_that_regions_alone(regions: tuple[Up, West], tmp_path: Path) -> None:
    """What only the west may run waits for the reason that is so, others start meanwhile, and the west comes back."""
    up, west = regions
    client = up.client()

    def round_of(what: str, fail: Callable[[], object], repair: Callable[[], object], code: str) -> None:
        def state() -> str:
            return next(str(region["state"]) for region in client.regions() if region["name"] == "west")

        before = tmp_path / f"before-{what}"
        _submitted(up, before, regions={"allow": ["west"]})
        wait_until(before.exists, f"the west works before: {what}")
        wait_until(lambda: state() == "answering", f"the west answers before: {what}")
        fail()
        if code == "bucket_unavailable":
            wait_until(lambda: state() == code, "the check finds it")
        waits = tmp_path / f"waits-{what}"
        waiting = _submitted(up, waits, regions={"allow": ["west"]})
        for number in range(_MEANWHILE):
            other = tmp_path / f"other-{what}-{number}"
            _submitted(up, other)
            wait_until(other.exists, f"others start meanwhile: {what}", _SOON_S / _MEANWHILE * 2)
        wait_until(lambda: code in {r["code"] for r in client.why(waiting)["reasons"]}, f"`why` gives {code}")
        assert state() == code.removeprefix("region_") and not waits.exists()
        repair()
        wait_until(waits.exists, f"the west works again: {what}")

    def kill() -> None:
        west.worker.kill()
        west.worker.wait()

    away = west.bucket.with_name("away")
    round_of(
        "stopped",
        lambda: os.kill(west.worker.pid, signal.SIGSTOP),
        lambda: os.kill(west.worker.pid, signal.SIGCONT),
        "region_silent",
    )
    round_of("killed", kill, west.start_worker, "region_silent")
    round_of("bucket", lambda: west.bucket.rename(away), lambda: _back(away, west.bucket), "bucket_unavailable")


def _back(away: Path, bucket: Path) -> None:
    if bucket.exists():  # The agent may have shipped a log meanwhile.
        bucket.rename(bucket.with_name("made-anew"))
    away.rename(bucket)
