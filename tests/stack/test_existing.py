"""`mizzen up` on a Postgres and a Temporal that are there already, and not its own alone."""

import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from infra.stack.ports import free_port
from tests.agent.harness import dev_server
from tests.stack.harness import Up, processes_of, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

SITE = """
version: 1
regions:
  - name: {region}
    clusters:
      - name: a
        machines: [{{name: m, count: 1, gpus: 4, gpu_type: a100, cpus: 16, memory: 16GiB}}]
"""


@pytest.fixture
def sites(tmp_path: Path, postgres_url: str) -> Iterator[tuple[Up, Up]]:
    """Two stacks with a region each, not started yet, of one database and one Temporal service."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("create database existing")
    database = postgres_url.rsplit("/", 1)[0] + "/existing"
    port = free_port()
    with dev_server(port):
        existing = {"database": database, "temporal": f"127.0.0.1:{port}"}
        both = [Up(tmp_path / region, SITE.format(region=region), **existing) for region in ("east", "west")]
        yield both[0], both[1]
        for site in both:
            site.close()


def test_sites_share_services_and_disturb_nobody(sites: tuple[Up, Up]) -> None:
    """Ctrl-C of one stops what runs on its machines, which goes on elsewhere; the other and the services stay."""
    east, west = sites
    east.start()
    east.client().set_tenant("t", 3, {"a100": 16}, None)
    workloads = [east.submit("first", steps=3000, step_s=0.1, tasks=4)]
    wait_until(lambda: east.phase(workloads[0]) == "running", "the first runs")
    west.start()
    wait_until(lambda: len(east.ready_machines()) == 2, "both know both")
    workloads.append(east.submit("second", steps=60, step_s=0.1, tasks=4))
    step = lambda: (east.client().workload(workloads[1]).get("progress") or {}).get("step")  # noqa: E731
    wait_until(lambda: west.phase(workloads[1]) == "running" and step(), "the second makes progress")
    assert [a["region"] for w in workloads for a in east.client().attempts(w)] == ["east", "west"]
    began_s = time.monotonic()
    assert west.interrupt() == 0
    assert time.monotonic() - began_s < 30, "it waited for what is not its own"
    assert processes_of(west.data) == {}
    (first,) = east.client().attempts(workloads[0])
    assert (east.phase(workloads[0]), first["released_at"]) == ("running", None)
    east.client().cancel(workloads[0])
    wait_until(lambda: east.ended(workloads[1]), "the second ends")
    saved, resumed = east.client().attempts(workloads[1])
    assert (saved["outcome"]["code"], resumed["region"]) == ("stack_stopped", "east")
    assert resumed["resumed_step"] >= saved["checkpoint_step"] > 0
    west.start()
    assert east.interrupt() == 0 and west.interrupt() == 0
    assert processes_of(east.data) == {} and processes_of(west.data) == {}
