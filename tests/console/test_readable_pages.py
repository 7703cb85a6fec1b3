"""What pages say in words: labels of keys, times, names, rules of fields; who holds what a workload waits for."""

import html
import json
import re

from sqlalchemy import func

from console.sentences import readable
from domain.capacity import CapacityKind
from domain.phases import Phase
from domain.reasons import Reason, ReasonCode
from infra.db import events
from infra.db.models import Attempt, Cluster, Workload
from infra.db.services import ServiceReplica
from infra.db.tenants import ApiKey
from tests.api.calls import act
from tests.api.world import ApiWorld
from tests.console.conftest import Browse
from tests.console.forms import csrf_of

SCRIPT = """version: 1
name: script
tenant: vision
jobs:
  - name: main
    resources: {cpus: 1, memory: 64MiB}
    run: |
      for i in 1 2; do
        echo $i
      done
"""


def test_sentences_have_labels_and_times() -> None:
    asked: list[set[str]] = []

    def labels(ids: set[str]) -> dict[str, str]:
        asked.append(ids)
        return {"0123456789ab": "ada <b>"}

    text = "cancelled by 0123456789ab and key-other at 2026-03-01T19:00:00+01:00; until 2026-03-02T08:30Z"
    assert readable(text, labels) == (
        "cancelled by ada <b> and key-other at 2026-03-01 18:00:00 UTC; until 2026-03-02 08:30:00 UTC"
    )
    assert asked == [{"0123456789ab", "key-other"}]
    assert readable("nothing to replace", labels) == "nothing to replace"
    assert len(asked) == 1


async def test_pages_have_the_labels_of_keys(world: ApiWorld, browse: Browse) -> None:
    """A key sees the labels of its tenant's keys; those of others stay ids. A label is text, not markup."""
    keys = {"ffffffffff01": ("vision", "ada <i>"), "ffffffffff02": (None, "root")}
    ids = []
    with world.session() as session:
        for key, (tenant, label) in keys.items():
            role = "submitter" if tenant else "operator"
            session.add(ApiKey(id=key, sha256=key, role=role, tenant=tenant, label=label))
    for key in keys:
        reason = Reason(ReasonCode.CANCELLED_BY_USER, {"by": key}).to_json()
        ids.append(world.add_workload(Phase.CANCELLED, reason=reason, finished_at=func.now()))
    async with browse("vision") as client:
        text = (await client.get("/console/workloads")).text
        assert "cancelled by ada &lt;i&gt;" in text and "cancelled by ffffffffff02" in text and "root" not in text
        assert "cancelled by ada &lt;i&gt;" in (await client.get(f"/console/workloads/{ids[0]}")).text
    async with browse("auditor") as client:
        assert "cancelled by root" in (await client.get("/console/workloads")).text


async def test_a_wrong_name_of_a_tenant(world: ApiWorld, browse: Browse) -> None:
    """The error says what a name may have, and shows no regular expression."""
    async with browse() as client:
        fields = {"csrf": csrf_of(await client.get("/console/tenants")), "name": "No Name", "level": "4", "gpus": ""}
        text = (await client.post("/console/tenants", data=fields)).text
        (error,) = re.findall('<p class="error">([^<]+)', text)
        assert "must be 1 to 63 lower-case letters, digits and hyphens" in error and "[a-z" not in error
        fields |= {"name": "fine", "gpus": "a100=<many>"}
        text = (await client.post("/console/tenants", data=fields)).text
    assert "Quota of GPUs: must be types with numbers, such as gpu=8, a100=16" in text
    # The form has what was entered.
    assert 'value="fine"' in text and 'value="a100=&lt;many&gt;"' in text and "<option selected>4</option>" in text


async def test_slots_are_numbers_and_how_many(world: ApiWorld, browse: Browse) -> None:
    """Slot number 0 is not no slot."""
    id_ = world.add_workload(Phase.RUNNING)
    world.add_attempt(id_, 1, "north/alpha/m1", 0b1)
    async with browse() as client:
        text = (await client.get("/console/machines/north/alpha/m1")).text
        assert "<dt>Slots held</dt><dd>1 of 8: number 0</dd>" in text and "<dt>Promised</dt><dd>none</dd>" in text


async def test_steps_of_a_workload_that_reports_none(world: ApiWorld, browse: Browse) -> None:
    id_ = world.add_workload(Phase.RUNNING)
    world.add_attempt(id_, 1, "north/alpha/m1", 0b1)
    async with browse() as client:
        assert "→" not in (await client.get(f"/console/workloads/{id_}")).text
        with world.session() as session:
            session.get_one(Attempt, (id_, 1)).last_step = 7
        assert "0 → 7" in (await client.get(f"/console/workloads/{id_}")).text


async def test_many_checkpoints_are_one_row_of_the_events(world: ApiWorld, browse: Browse) -> None:
    id_ = world.add_workload(Phase.RUNNING)
    with world.session() as session:
        for kind in ("running", "checkpoint", "checkpoint", "checkpoint", "evicting", "checkpoint"):
            events.record(session, f"workload.{kind}", tenant="vision", workload=id_, attempt=1)
    async with browse() as client:
        text = (await client.get(f"/console/workloads/{id_}")).text
    found = re.findall(r"</time></td><td>([^<]+)</td>", text)
    assert found[:4] == ["checkpoint", "evicting", "checkpoint, 3 times", "running"]


async def test_how_many_tasks_an_elastic_workload_has(world: ApiWorld, browse: Browse) -> None:
    id_ = world.add_workload(Phase.RUNNING)
    with world.session() as session:
        row = session.get_one(Workload, id_)
        spec = json.loads(json.dumps(row.spec))
        spec["jobs"][0] |= {"tasks": 1, "most_tasks": 4}
        row.spec = spec
    world.add_attempt(id_, 1, "north/alpha/m1", 0b11)
    async with browse() as client:
        text = (await client.get(f"/console/workloads/{id_}")).text
    assert "<dt>Tasks</dt><dd>2; from 1 to 4</dd>" in text


async def test_a_document_of_several_lines(world: ApiWorld, browse: Browse) -> None:
    """A script is shown, and cloned, as it was written."""
    async with browse("vision") as client:
        fields = {"csrf": csrf_of(await client.get("/console/workloads/new")), "document": SCRIPT}
        made = await client.post("/console/workloads/new", data=fields)
        text = html.unescape((await client.get(f"{made.headers['location']}/clone")).text)
    assert "  run: |\n    for i in 1 2; do\n      echo $i\n    done\n" in text


async def test_who_uses_what_a_workload_waits_for(world: ApiWorld, browse: Browse) -> None:
    """Tenants that the key may not see are one row; a workload that runs or needs other GPUs has no such rows."""
    for tenant, slots in (("vision", 0b1), ("speech", 0b1110)):
        id_ = world.add_workload(Phase.RUNNING, tenant=tenant)
        world.add_attempt(id_, 1, "north/alpha/m1", slots)
    waits = world.add_workload(Phase.PENDING)
    row = r'<tr><th scope="row">([^<]+)</th><td class="number">(\d+)</td>'
    async with browse("vision") as client:
        for path in (f"/console/workloads/{waits}", "/console/tenants"):
            text = (await client.get(path)).text
            assert re.findall(row, text) == [("vision", "1"), ("other tenants", "3")], path
            assert "speech" not in text
    async with browse() as client:
        text = (await client.get(f"/console/workloads/{waits}")).text
        assert re.findall(row, text) == [("speech", "3"), ("vision", "1")]
        assert "Who uses" not in (await client.get(f"/console/workloads/{id_}")).text


async def test_zones_and_clusters_of_a_region(world: ApiWorld, browse: Browse) -> None:
    with world.session() as session:
        cluster = session.get_one(Cluster, ("north", "alpha"))
        cluster.zone, cluster.capacity = "north-1", CapacityKind.SPOT.value
    async with browse("vision") as client:
        text = (await client.get("/console/fleet/north")).text
        assert "north-1" in text and '<a href="/console/fleet/north?cluster=alpha">alpha</a>' in text
        text = (await client.get("/console/fleet/north?cluster=alpha")).text
        assert "/console/machines/north/alpha/m1" in text and "the whole region" in text
        text = (await client.get("/console/fleet/north?cluster=nothing")).text
        assert "/console/machines/" not in text


async def test_machines_list_workloads_by_name(world: ApiWorld, browse: Browse) -> None:
    for tenant in ("vision", "speech"):
        id_ = world.add_workload(Phase.RUNNING, tenant=tenant, name=f"of-{tenant}")
        world.add_attempt(id_, 1, "north/alpha/m1", 1 if tenant == "vision" else 2)
    async with browse("vision") as client:
        text = (await client.get("/console/machines/north/alpha/m1")).text
    assert ">of-vision</a>" in text and "of-speech" not in text and id_ not in text


async def test_ready_replicas_by_version_and_zone(world: ApiWorld, browse: Browse) -> None:
    chat = {"version": 1, "name": "chat", "tenant": "vision", "service": {"replicas": 1}, "run": "serve"}
    made = (await act(world, "/v1/services", "vision", chat)).json()["id"]
    with world.session() as session:
        for number, zone, ready in ((0, "north/a", True), (1, "north/a", False), (2, None, True)):
            replica = world.add_workload(Phase.RUNNING, name=f"chat-{number}")
            session.add(
                ServiceReplica(
                    service=made, number=number, version=1, workload=replica, kind="spot",
                    zone=zone, cluster=None, usd_per_h=None, is_base=True, replaces=None, ready=ready,
                    ready_changed_at=func.now(), first_ready_at=func.now(),
                )
            )  # fmt: skip
    async with browse("vision") as client:
        text = (await client.get(f"/console/services/{made}")).text
    assert re.search(r">chat-\d</a>", text) and not re.search(r">wl-", text)
    assert re.search(r"<td>north/a</td><td>spot</td><td class=\"number warn\">1 of 2</td>", text)
    assert re.search(r"<td>shared machines</td><td>spot</td><td class=\"number\">1 of 1</td>", text)
