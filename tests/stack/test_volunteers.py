"""A volunteer's machine on a whole stack: its agent reaches Temporal through the gateway only."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.stack.ports import free_port
from mizzen.client import Client
from mizzen.client.errors import ClientError
from tests.gateway.site import certificate
from tests.stack.harness import ROOT, Up, processes_of, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]
MACHINE = "east/campus/pc1"


@contextlib.contextmanager
def _running(log: Path, *arguments: str, **environ: str) -> Iterator[None]:
    """Runs a command of the server in a process."""
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "server", *arguments],
            cwd=ROOT, stdout=file, stderr=file, env={**os.environ, **environ},
        )  # fmt: skip
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)


def test_a_volunteers_machine_runs_what_names_its_kind(shared: Up, tmp_path: Path) -> None:
    """Only a workload that names the capacity kind `voluntary` is placed there; the owner sees it with the key.

    A failed task counts against the workload only after another volunteer's machine has confirmed it.
    """
    operator = shared.client()
    made = operator.create_key("machine", label="owner of pc1", machine=MACHINE)
    kinds = {(c["region"], c["name"]): c["capacity"] for c in operator.clusters()}
    assert kinds["east", "campus"] == "voluntary"
    tls, port = certificate(tmp_path), free_port()
    gateway = ["gateway", "--config", str(shared.data / "run" / "settings.yaml"), "--listen", f"127.0.0.1:{port}"]
    gateway += ["--tls-cert", str(tls.chain), "--tls-key", str(tls.key)]
    bucket = next(region["bucket_url"] for region in operator.regions() if region["name"] == "east")
    settings = tmp_path / "agent.yaml"
    settings.write_text("tasks: {separate_tenants: false, private_tmp: false}\n")

    def agent(name: str, ports: str) -> list[str]:
        words = ["agent", "--config", str(settings), "--region", "east", "--cluster", "campus", "--name", name]
        words += ["--bucket", bucket, "--state-dir", str(tmp_path / name), "--gpus", "1", "--gpu-type", "lab"]
        words += ["--cpus", "1", "--memory", "1GiB", "--ports", ports, "--temporal", f"127.0.0.1:{port}"]
        return [*words, "--temporal-ca", str(tls.chain)]

    document = {
        "version": 1,
        "name": "usual",
        "tenant": "t",
        "jobs": [{"name": "main", "tasks": 1, "resources": {"accelerators": "lab:1", "cpus": 0.1, "memory": "64MiB"},
                  "run": f"while [ ! -e {tmp_path}/go ]; do sleep 0.1; done"}],
    }  # fmt: skip
    operator.set_tenant("t", 3, {"a100": 16, "lab": 1}, None)
    with (
        _running(tmp_path / "gateway.log", *gateway),
        _running(tmp_path / "pc1.log", *agent("pc1", "19500-19539"), MIZZEN_TEMPORAL_API_KEY=made["key"]),
    ):
        wait_until(lambda: MACHINE in shared.ready_machines(), "the volunteer's machine is ready")
        usual = str(operator.submit(document)["id"])
        willing = str(operator.submit({**document, "name": "willing", "capacity": ["voluntary"]})["id"])
        wait_until(lambda: shared.phase(willing) == "running", "the willing workload runs")
        assert shared.machines_of(willing) == [MACHINE]
        with Client(f"http://127.0.0.1:{shared.ports['port']}", made["key"]) as owner:
            seen = owner.machine_lending(MACHINE)
            assert [(one["workload"], one["tenant"]) for one in seen["running"]] == [(willing, "t")]
            with pytest.raises(ClientError, match="the key has the role machine"):
                owner.workload(willing)
        (tmp_path / "go").touch()
        wait_until(lambda: shared.ended(willing), "the willing workload has ended")
        assert shared.phase(usual) == "pending", "the machine is free, but the workload does not name its kind"
        operator.cancel(usual)
        wait_until(lambda: shared.phase(usual) == "cancelled", "the other workload has ended")
        jobs = [{**document["jobs"][0], "run": "exit 3"}]  # type: ignore[index]
        failing = str(operator.submit({**document, "name": "failing", "capacity": ["voluntary"], "jobs": jobs})["id"])
        wait_until(lambda: _waits_for(operator, failing) == [MACHINE], "the workload waits for another machine")
        other = operator.create_key("machine", machine="east/campus/pc2")
        with _running(tmp_path / "pc2.log", *agent("pc2", "19540-19579"), MIZZEN_TEMPORAL_API_KEY=other["key"]):
            wait_until(lambda: shared.phase(failing) == "failed", "the failure is confirmed")
            assert operator.workload(failing)["reason"]["code"] == "retries_exhausted"
            held = [one["machine"] for one in operator.allocations(failing)]
            assert sorted(held) == [MACHINE, "east/campus/pc2"]
        operator.revoke_key(other["id"])
    operator.revoke_key(made["id"])
    wait_until(lambda: not processes_of(tmp_path / "pc1"), "the agent has ended")


def _waits_for(operator: Client, workload: str) -> list[str]:
    """Returns the machines that a workload in the queue avoids."""
    said = operator.why(workload)["reasons"]
    return [machine for r in said if r["code"] == "machines_avoided" for machine in r["detail"]["machines"]]
