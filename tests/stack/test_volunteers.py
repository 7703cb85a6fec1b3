"""A volunteer's machine on a whole stack: its agent reaches Temporal through the gateway only."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.config.services import TemporalSettings
from infra.stack.ports import free_port
from mizzen_client import Client
from mizzen_client.errors import ClientError
from tests.proxies.gateway.site import certificate
from tests.stack.harness import ROOT, Up, processes_of, wait_until
from tests.stack.idler import idler

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


class Campus:
    """A gateway to the shared stack, and machines of volunteers behind it."""

    def __init__(self, stack: Up, folder: Path) -> None:
        self._stack, self._folder = stack, folder
        self._tls, self._port = certificate(folder), free_port()
        (folder / "agent.yaml").write_text("tasks: {isolation: none}\n")

    def gateway(self) -> list[str]:
        """Returns the command of the gateway."""
        words = ["gateway", "--config", str(self._stack.data / "run" / "settings.yaml")]
        words += ["--listen", f"127.0.0.1:{self._port}"]
        return [*words, "--tls-cert", str(self._tls.chain), "--tls-key", str(self._tls.key)]

    def agent(self, name: str, ports: str, gpu_type: str = "lab") -> list[str]:
        """Returns the command of the agent of a machine with one GPU."""
        bucket = next(region["bucket_url"] for region in self._stack.client().regions() if region["name"] == "east")
        words = ["agent", "--config", str(self._folder / "agent.yaml"), "--region", "east", "--cluster", "campus"]
        words += ["--name", name, "--bucket", bucket, "--state-dir", str(self._folder / name), "--gpus", "1"]
        words += ["--gpu-type", gpu_type, "--cpus", "1", "--memory", "1GiB", "--ports", ports]
        return [*words, "--temporal", f"127.0.0.1:{self._port}", "--temporal-ca", str(self._tls.chain)]

    def temporal(self, key: str) -> TemporalSettings:
        """Returns the settings with which a program connects with the key of a machine."""
        return TemporalSettings(address=f"127.0.0.1:{self._port}", tls_ca=self._tls.chain, api_key=key)


def _document(name: str, run: str, tasks: int = 1, gpu_type: str = "lab", **more: Any) -> dict[str, Any]:
    resources = {"accelerators": f"{gpu_type}:1", "cpus": 0.1, "memory": "64MiB"}
    job = {"name": "main", "tasks": tasks, "resources": resources, "run": run}
    return {"version": 1, "name": name, "tenant": "t", "jobs": [job], **more}


@pytest.mark.long
def test_a_machine_that_accepts_everything_and_starts_nothing_earns_nothing(shared: Up, tmp_path: Path) -> None:
    """It gets work only while no honest machine has room, each gang once, and no more after its first launch.

    It needs an operator to claim that many GPUs.
    """
    operator, campus = shared.client(), Campus(shared, tmp_path)
    names = ("honest1", "honest2", "a-liar")
    honest, liar = {f"east/campus/{name}" for name in names[:2]}, f"east/campus/{names[2]}"
    keys = {name: operator.create_key("machine", machine=f"east/campus/{name}") for name in names}
    gpu_type = "desk"  # No other test uses these machines, which are lost only some time after this test.
    operator.set_tenant("t", 3, {"a100": 16, gpu_type: 100}, None)

    def submit(name: str, run: str, tasks: int = 1) -> str:
        return str(operator.submit(_document(name, run, tasks, gpu_type, capacity=["voluntary"]))["id"])

    def used(workloads: list[str]) -> list[set[str]]:
        return [{one["machine"] for one in operator.allocations(workload)} for workload in workloads]

    with contextlib.ExitStack() as stack:
        stack.enter_context(_running(tmp_path / "gateway.log", *campus.gateway()))
        for number, name in enumerate(names[:2]):
            ports = f"{19580 + 20 * number}-{19599 + 20 * number}"
            log, key = tmp_path / f"{name}.log", keys[name]["key"]
            stack.enter_context(_running(log, *campus.agent(name, ports, gpu_type), MIZZEN_TEMPORAL_API_KEY=key))
        wait_until(lambda: honest <= set(shared.ready_machines()), "the honest machines are ready")
        for number in range(3):  # So that it is known what launches take.
            gang = submit(f"gang{number}", "true", 2)
            wait_until(lambda gang=gang: shared.ended(gang), "the gang has ended")
        stack.enter_context(idler(campus.temporal(keys[names[2]]["key"]), liar, 62, gpu_type))
        wait_until(lambda: liar in shared.ready_machines(), "the liar is ready")
        cordon = next(one["cordon"] for one in operator.machines() if one["id"] == liar)
        assert cordon["code"] == "claims_too_much", cordon
        operator.set_machine(liar, "uncordon")
        for number in range(3):
            alone = submit(f"alone{number}", "true", 2)  # One machine of the liar would be more compact.
            wait_until(lambda alone=alone: shared.ended(alone), "a workload has ended")
            assert used([alone])[0] == honest, "the honest machines were idle"
        crowd = [submit(f"crowd{number}", "sleep 3") for number in range(6)]
        wait_until(lambda: all(shared.ended(one) for one in crowd), "all workloads have ended")
        visits = [liar in machines for machines in used(crowd)]
        assert 0 < sum(visits) <= 4, "it got what no other machine had room for"
        later = [submit(f"later{number}", "sleep 1") for number in range(6)]
        wait_until(lambda: all(shared.ended(one) for one in later), "all later workloads have ended")
        assert all(machines <= honest for machines in used(later))
        lending = operator.machine_lending(liar)
        assert lending["held_gpu_h"] > 0 and lending["given_gpu_h"] == 0
        for key in keys.values():
            operator.revoke_key(key["id"])


@pytest.mark.rotating
def test_a_volunteers_machine_runs_what_names_its_kind(shared: Up, tmp_path: Path) -> None:
    """Only a workload that names the capacity kind `voluntary` is placed there; the owner sees it with the key.

    A failed task counts against the workload only after another volunteer's machine has confirmed it.
    """
    operator, campus = shared.client(), Campus(shared, tmp_path)
    made = operator.create_key("machine", label="owner of pc1", machine=MACHINE)
    kinds = {(c["region"], c["name"]): c["capacity"] for c in operator.clusters()}
    assert kinds["east", "campus"] == "voluntary"
    document, agent = _document("usual", f"while [ ! -e {tmp_path}/go ]; do sleep 0.1; done"), campus.agent
    operator.set_tenant("t", 3, {"a100": 16, "lab": 1}, None)
    with (
        _running(tmp_path / "gateway.log", *campus.gateway()),
        _running(tmp_path / "pc1.log", *agent("pc1", "19500-19539"), MIZZEN_TEMPORAL_API_KEY=made["key"]),
    ):
        wait_until(lambda: MACHINE in shared.ready_machines(), "the volunteer's machine is ready")
        usual = str(operator.submit(document)["id"])
        willing = str(operator.submit({**document, "name": "willing", "capacity": ["voluntary"]})["id"])
        wait_until(lambda: shared.phase(willing) == "running", "the willing workload runs")
        assert shared.machines_of(willing) == [MACHINE]
        with Client(f"http://127.0.0.1:{shared.port}", made["key"]) as owner:
            seen = owner.machine_lending(MACHINE)
            assert [(one["workload"], one["tenant"]) for one in seen["running"]] == [(willing, "t")]
            with pytest.raises(ClientError, match="the key has the role machine"):
                owner.workload(willing)
        (tmp_path / "go").touch()
        wait_until(lambda: shared.ended(willing), "the willing workload has ended")
        assert shared.phase(usual) == "pending", "the machine is free, but the workload does not name its kind"
        operator.cancel(usual)
        wait_until(lambda: shared.phase(usual) == "cancelled", "the other workload has ended")
        jobs = [{**document["jobs"][0], "run": "exit 3"}]
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
