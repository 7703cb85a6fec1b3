"""Sites of one installation share an existing Postgres and Temporal, and fail independently."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from infra.stack.ports import free_port
from tests.agent.harness import dev_server
from tests.stack.harness import ROOT, Up, processes_of, wait_until
from tests.stack.silence import removes_silent

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

SITE = """
version: 1
regions:
  - name: {region}
    clusters:
      - name: a
        machines: [{{name: m, count: 1, gpus: 4, gpu_type: a100, cpus: 16, memory: 16GiB}}]
"""
BUCKETS = "buckets: {interval_s: 0.5, retry_s: 0.5, retry_max_s: 1}\n"
_MEANWHILE = 4
_SOON_S = 30.0
"""Half of the time limit for all submissions. A bid without a deadline would take 15 s each time."""


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory, postgres_url: str) -> Iterator[tuple[Up, Up]]:
    """Two stacks, each with one region, on one database and one Temporal; the first stack is running."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("create database sites")
    database = postgres_url.rsplit("/", 1)[0] + "/sites"
    port, folder = free_port(), tmp_path_factory.mktemp("sites")
    with dev_server(port):
        existing = {"database": database, "temporal": f"127.0.0.1:{port}"}
        east, west = (Up(folder / region, SITE.format(region=region), **existing) for region in ("east", "west"))
        config = east.folder / "config.yaml"
        config.write_text(config.read_text() + BUCKETS)
        try:
            east.start()
            east.client().set_tenant("t", 3, {"a100": 99}, None)
            yield east, west
            assert east.interrupt() == 0
            assert west.process is None or west.interrupt() == 0
            assert processes_of(east.data) == {} and processes_of(west.data) == {}
        finally:
            east.close()
            west.close()


class North:
    """A third region, `north`, with its own worker and agent; no supervisor restarts them."""

    def __init__(self, up: Up) -> None:
        self._up = up
        self._flags = ["--config", str(up.folder / "config.yaml")]
        for name, value in up.existing.items():
            self._flags += [f"--{name}", value]
        self.bucket = up.folder / "north-bucket"
        url = f"file://{self.bucket}"
        init = [sys.executable, "-m", "server", "init", *self._flags, "--data-dir", str(up.data)]
        subprocess.run([*init, "--region", f"north={url}"], cwd=ROOT, check=True, capture_output=True)
        self.worker = self.start_worker()
        self._agent = self._start(
            "agent", "--region", "north", "--cluster", "a", "--name", "m", "--bucket", url, "--gpus", "1", "--gpu-type",
            "a100", "--cpus", "2", "--memory", "2GiB", "--state-dir", str(up.folder / "agent"),
            "--ports", "21000-21099",
        )  # fmt: skip

    def start_worker(self) -> "subprocess.Popen[bytes]":
        """Starts the region's worker."""
        self.worker = self._start("worker", "--role", "region", "--region", "north")
        return self.worker

    def _start(self, *command: str) -> "subprocess.Popen[bytes]":
        with (self._up.folder / f"north-{command[0]}.log").open("ab") as log:
            whole = [sys.executable, "-m", "server", *command, *self._flags]
            return subprocess.Popen(whole, cwd=ROOT, stdout=log, stderr=log)

    def close(self) -> None:
        """Kills worker and agent."""
        for process in (self.worker, self._agent):
            process.kill()
            process.wait()


@pytest.fixture
def north(sites: tuple[Up, Up]) -> Iterator[North]:
    """The region `north`, whose machine is ready."""
    region = North(sites[0])
    try:
        wait_until(lambda: "north/a/m" in sites[0].ready_machines(), "the machine of the region north is ready")
        yield region
    finally:
        region.close()


def _submitted(up: Up, mark: Path, **more: object) -> str:
    """Submits a workload whose task creates the file `mark`; returns its id."""
    resources = {"accelerators": "a100:1", "cpus": 0.1, "memory": "64MiB"}
    job = {"name": "mark", "tasks": 1, "resources": resources, "run": f'touch "{mark}"'}
    return str(up.client().submit({"version": 1, "name": mark.name, "tenant": "t", "jobs": [job], **more})["id"])


@pytest.mark.long
def test_one_regions_failure_is_that_regions_alone(sites: tuple[Up, Up], north: North, tmp_path: Path) -> None:
    """If the worker of a region hangs or dies, or its bucket disappears, only workloads that need that region wait.

    `mizzen why` gives the cause for them, other workloads start in the meantime, and the region recovers.
    """
    up = sites[0]
    client = up.client()

    def round_of(what: str, fail: Callable[[], object], repair: Callable[[], object], code: str) -> None:
        def state() -> str:
            return next(str(region["state"]) for region in client.regions() if region["name"] == "north")

        before = tmp_path / f"before-{what}"
        _submitted(up, before, regions={"allow": ["north"]})
        wait_until(before.exists, f"the region runs workloads before the failure: {what}")
        wait_until(lambda: state() == "answering", f"the region answers before the failure: {what}")
        fail()
        if code == "bucket_unavailable":
            wait_until(lambda: state() == code, "the check detects the missing bucket")
        waits = tmp_path / f"waits-{what}"
        waiting = _submitted(up, waits, regions={"allow": ["north"]})
        for number in range(_MEANWHILE):
            other = tmp_path / f"other-{what}-{number}"
            _submitted(up, other)
            wait_until(other.exists, f"other workloads start during the failure: {what}", _SOON_S / _MEANWHILE * 2)
        wait_until(lambda: code in {r["code"] for r in client.why(waiting)["reasons"]}, f"`mizzen why` gives {code}")
        assert state() == code.removeprefix("region_") and not waits.exists()
        repair()
        wait_until(waits.exists, f"the region runs workloads after the failure: {what}")

    def kill() -> None:
        north.worker.kill()
        north.worker.wait()

    away = north.bucket.with_name("away")
    round_of(
        "stopped",
        lambda: os.kill(north.worker.pid, signal.SIGSTOP),
        lambda: os.kill(north.worker.pid, signal.SIGCONT),
        "region_silent",
    )
    round_of("killed", kill, north.start_worker, "region_silent")
    round_of("bucket", lambda: north.bucket.rename(away), lambda: _back(away, north.bucket), "bucket_unavailable")


def _back(away: Path, bucket: Path) -> None:
    if bucket.exists():  # The agent creates the folder again if it uploads a log in the meantime.
        bucket.rename(bucket.with_name("made-anew"))
    away.rename(bucket)


@pytest.mark.long
def test_sites_share_services_and_disturb_nobody(sites: tuple[Up, Up], tmp_path: Path) -> None:
    """When one site is stopped, its workload moves to the other site; the other site and the services keep running.

    The region of the stopped site is shown as silent and blocks no workload, until it is removed.
    """
    east, west = sites
    workloads = [east.submit("first", steps=3000, step_s=0.1, tasks=4)]
    wait_until(lambda: east.phase(workloads[0]) == "running", "the first workload runs")
    west.start()
    wait_until(lambda: len(east.ready_machines()) == 2, "the machines of both sites are ready")
    workloads.append(east.submit("second", steps=60, step_s=0.1, tasks=4))
    wait_until(lambda: west.phase(workloads[1]) == "running" and east.saved_step(workloads[1]), "the second one saves")
    assert [a["region"] for w in workloads for a in east.client().attempts(w)] == ["east", "west"]
    began_s = time.monotonic()
    assert west.interrupt() == 0
    assert time.monotonic() - began_s < 30, "the stopped site waited for workloads of the other site"
    assert processes_of(west.data) == {}
    (first,) = east.client().attempts(workloads[0])
    assert (east.phase(workloads[0]), first["released_at"]) == ("running", None)
    east.client().cancel(workloads[0])
    wait_until(lambda: east.ended(workloads[1]), "the second workload succeeds")
    saved, resumed = east.client().attempts(workloads[1])
    assert (saved["outcome"]["code"], resumed["region"]) == ("stack_stopped", "east")
    assert resumed["resumed_step"] >= saved["checkpoint_step"] > 0

    gate = tmp_path / "gate"
    running, waiting = (east.submit(name, steps=1, step_s=0.0, tasks=4, gate=gate) for name in ("third", "fourth"))
    wait_until(lambda: east.phase(running) == "running", "the third workload runs in the other region")

    removes_silent(east, waiting, "west", "east")
    gate.touch()
    wait_until(lambda: east.ended(running) and east.ended(waiting), "both workloads succeed")
    logs = (east.data / "run" / "log").glob("worker*.log")
    assert "region west has not answered within 2 s" in "".join(path.read_text() for path in logs)
