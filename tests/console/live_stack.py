"""A live stack with a few hundred workloads of every kind that the pages show."""

import os
from functools import partial
from pathlib import Path
from typing import Any

from domain.ids import table_prefix
from mizzen.objects import open_store
from tests.stack.harness import ROOT, Up, wait_until

FLEET = f"""
version: 1
regions:
  - name: east
    clusters:
      - name: a
        zone: east-1
        prices: {{a100: 2.5, cpu: 0.03}}
        machines: [{{name: m, count: 2, gpus: 4, gpu_type: a100, cpus: 16, memory: 16GiB}}]
      - name: lab
        zone: east-2
        capacity: voluntary
        machines: [{{name: m, gpus: 2, gpu_type: l4, cpus: 4, memory: 4GiB, owner: "{os.getuid()}"}}]
  - name: west
    clusters:
      - name: a
        machines: [{{name: m, gpus: 4, gpu_type: a100, cpus: 16, memory: 16GiB}}]
"""
SETTINGS = "limits: {streams_per_key: 20}\n"
SHORT, FAILING, WAITING, ELEMENTS = 30, 6, 120, 150
LENT = "east/lab/m"


def document(name: str, run: str, tenant: str = "t", **more: Any) -> dict[str, Any]:
    """Returns a workload of one task."""
    resources = {"cpus": 0.1, "memory": "64MiB", **more.pop("resources", {})}
    job = {"name": "main", "tasks": more.pop("tasks", 1), "resources": resources, "run": run}
    return {"version": 1, "name": name, "tenant": tenant, "jobs": [job], **more}


class LiveStack:
    """The stack, and what was submitted to it."""

    def __init__(self, up: Up) -> None:
        self.up = up
        self.client = up.client()
        self.console = f"{self.client.url}/console"
        self.gate = up.folder / "gate"
        self.keys: dict[str, str] = {"operator": (up.data / "operator.key").read_text().strip()}
        self.ids: dict[str, str] = {}

    def submit(self, name: str, run: str, **more: Any) -> str:
        """Submits a workload of one task; returns its id."""
        id_ = self.ids[name] = str(self.client.submit(document(name, run, **more))["id"])
        return id_

    def fill(self) -> None:
        """Submits workloads, a service and a table, and waits until all that can run have started or ended."""
        client = self.client
        client.set_tenant("t", 3, {"a100": 16, "l4": 2}, None)
        client.set_tenant("others", 4, {"a100": 16}, None)
        self.keys["t"] = client.create_key("submitter", tenant="t", label="ada")["key"]
        self.keys["others"] = client.create_key("submitter", tenant="others", label="bob")["key"]
        hold = f'while ! test -e "{self.gate}"; do sleep 0.5; done'
        for number in range(2):
            self.ids[f"trains-{number}"] = self.up.submit(f"trains-{number}", 100_000, 0.2, gate=self.gate)
        self.submit("secret-run", hold, tenant="others", resources={"accelerators": "a100:2"})
        self.submit("on-lent", hold, resources={"accelerators": "l4:1"}, capacity=["voluntary"])
        for name in list(self.ids):
            wait_until(partial(self._runs, name), f"{name} runs", 600)
        run = 'echo "element $MIZZEN_ARRAY_INDEX"; test $((MIZZEN_ARRAY_INDEX % 50)) != 7'
        self.submit("sweep", run, array={"indexes": f"0-{ELEMENTS - 1}", "throttle": 20})
        for number in range(WAITING):
            tenant = "others" if number % 4 == 3 else "t"
            self.submit(f"waits-{number:03}", "true", tenant=tenant, tasks=4, resources={"accelerators": "a100:3"},
                        labels={"batch": "first" if 2 <= number < 10 else "other"})  # fmt: skip
        for number in range(SHORT):
            self.submit(f"short-{number:03}", 'echo "it <b>runs</b>"', labels={"team": "red"})
        for number in range(FAILING):
            self.submit(f"fails-{number}", "echo no; exit 3", limits={"retries": 0})
        self._add_table()
        self._add_service()
        for name in (f"short-{SHORT - 1:03}", f"fails-{FAILING - 1}", "sweep"):
            wait_until(partial(self._has_ended, name), f"{name} ends", 900)
        self.ids["placement"] = str(client.begin_placement_run(dry_run=True)["id"])
        wait_until(lambda: sum(client.service("chat")["ready"].values()) == 1, "the service is ready", 600)

    def _runs(self, name: str) -> bool:
        return self.up.phase(self.ids[name]) == "running"

    def _has_ended(self, name: str) -> bool:
        return self.up.phase(self.ids[name]) in ("succeeded", "failed")

    def _add_table(self) -> None:
        east = next(one for one in self.client.regions() if one["name"] == "east")
        open_store(str(east["bucket_url"])).put(f"{table_prefix('digits')}part-0", b"0123456789" * 1000)
        self.client.add_table("digits", "east")
        self.client.replicate_table("digits", "west")

    def _add_service(self) -> None:
        example = ROOT / "examples" / "serving" / "server.py"
        body = {
            "version": 1, "name": "chat", "tenant": "t",
            "service": {"readiness_probe": {"path": "/health"}, "replica_policy": {"min_replicas": 1}},
            "resources": {"cpus": 0.2, "memory": "128MiB"}, "run": f'exec "$MIZZEN_PYTHON" "{example}"',
        }  # fmt: skip
        self.ids["chat"] = str(self.client.create_service(body)["id"])


def start(folder: Path) -> LiveStack:
    """Starts a stack without tenants and workloads."""
    up = Up(folder, FLEET, lost_s=120, settings=SETTINGS)
    try:
        up.start(machines=False, timeout_s=900)
        wait_until(lambda: len(up.ready_machines()) >= up.machines, "all machines are ready", 600)
    except BaseException:
        up.close()
        raise
    return LiveStack(up)
