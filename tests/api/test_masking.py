"""Masking of other tenants' workloads: reasons and events count them, but do not have their ids."""

import json

import pytest
from sqlalchemy import update

from domain.phases import Phase
from domain.reasons import Reason, ReasonCode
from infra.db import events
from infra.db.logs import Waiting
from infra.db.models import Attempt, Machine, Workload
from tests.api.calls import T0, get
from tests.api.world import ApiWorld, as_yaml, document


@pytest.fixture
def told(world: ApiWorld) -> tuple[ApiWorld, str, str, str]:
    """Returns a world whose reasons refer to other tenants' workloads, two ids of vision and one of speech."""
    own, other = world.add_workload(Phase.RUNNING), world.add_workload(Phase.RUNNING, tenant="speech")
    waits, queued = world.add_workload(Phase.PLACING), world.add_workload(Phase.PREEMPTED)
    evicted = Reason(ReasonCode.EVICTED, {"evictor": other, "evictor_rank": 1, "rank": 3})
    waiting = Reason(ReasonCode.WAITING_FOR_VICTIMS, {"victims": [own, other, other], "region": "north"})
    for id_ in (waits, queued):
        world.add_attempt(id_, 1, "north/alpha/m1", 0b11, released_at=T0, outcome=evicted.to_json(), evictor=other)
    with world.session() as session:
        session.execute(update(Workload).where(Workload.id == waits).values(reason=waiting.to_json()))
        session.execute(update(Workload).where(Workload.id == queued).values(reason=evicted.to_json()))
        session.add(Waiting(workload=queued, reasons={"reasons": [evicted.to_json()]}))
        detail = {"machines": ["north/alpha/m1"], "victims": [own, other], "rank": 3}
        events.record(session, "workload.placing", tenant="vision", workload=waits, reason=waiting, detail=detail)
        blames = Reason(ReasonCode.KEEPS_FAILING_GANGS, {"failures": 3, "workload": other})
        session.execute(update(Machine).where(Machine.id == "north/alpha/m2").values(cordon=blames.to_json()))
        assert session.get_one(Attempt, (waits, 1)).evictor == other
    return world, waits, queued, other


PATHS = [
    "/v1/workloads", "/v1/workloads/{waits}", "/v1/workloads/{waits}/why", "/v1/workloads/{waits}/attempts",
    "/v1/workloads/{queued}", "/v1/workloads/{queued}/why", "/v1/workloads/{queued}/attempts", "/v1/queue",
    "/v1/machines", "/v1/machines/north/alpha/m2", "/v1/workloads/{waits}/events?follow=false",
    "/v1/events?follow=false",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
async def test_others_are_not_named(told: tuple[ApiWorld, str, str, str], path: str) -> None:
    """Responses to operators have the ids of other tenants' workloads; responses to a tenant's keys do not."""
    world, waits, queued, other = told
    url = path.format(waits=waits, queued=queued)
    texts = {}
    for key in ("operator", "auditor", "vision", "vision-viewer", "speech"):
        async with world.client(key) as client:
            answer = await client.get(url)
            texts[key] = answer.text if answer.status_code == 200 else ""
    if path != "/v1/workloads":
        assert other in texts["operator"] and other in texts["auditor"]
    for key in ("vision", "vision-viewer"):
        assert texts[key] and other not in texts[key]
        assert "of another tenant" in texts[key] or "of other tenants" in texts[key]
    assert waits not in texts["speech"] and queued not in texts["speech"]


async def test_sentences_count_those_that_they_do_not_name(told: tuple[ApiWorld, str, str, str]) -> None:
    """For a tenant's key, the detail and the sentence have the ids of own victims and the number of others."""
    world, waits, _, _ = told
    (reason,) = (await get(world, f"/v1/workloads/{waits}/why", key="vision"))["reasons"]
    own, others = reason["detail"]["victims"]
    assert (others, reason["detail"]["region"]) == ("2 workloads of other tenants", "north")
    assert reason["sentence"] == f"waits for the slots of {own}, {others}, which it evicts"
    attempt = (await get(world, f"/v1/workloads/{waits}/attempts", key="vision"))["items"][0]
    assert attempt["evictor"] == "a workload of another tenant"
    assert attempt["outcome"]["sentence"] == "evicted by a workload of another tenant (rank 1 against 3)"


async def test_what_changes_answers_with_is_masked(told: tuple[ApiWorld, str, str, str]) -> None:
    """Responses to changes are masked too, also the repeated response for an idempotency key."""
    world, _, queued, other = told
    headers = {"idempotency-key": "once", "content-type": "application/yaml"}
    async with world.client("vision") as client:
        for action in ("hold", "release"):
            answer = await client.post(f"/v1/workloads/{queued}/{action}", json={})
            assert answer.status_code == 202 and other not in answer.text
        body = as_yaml(document())
        made = (await client.post("/v1/workloads", content=body, headers=headers)).json()
        reason = Reason(ReasonCode.WAITING_FOR_VICTIMS, {"victims": [other], "region": "north"})
        with world.session() as session:
            values = {"phase": Phase.PLACING.value, "reason": reason.to_json()}
            session.execute(update(Workload).where(Workload.id == made["id"]).values(values))
        again = await client.post("/v1/workloads", content=body, headers=headers)
    assert again.json()["id"] == made["id"]
    assert again.json()["reason"]["code"] == "waiting_for_victims" and other not in again.text


async def test_what_users_wrote_stays(world: ApiWorld) -> None:
    """Ids in labels that a user wrote are not masked."""
    other = world.add_workload(tenant="speech")
    id_ = world.add_workload(labels={"after": other})
    reason = Reason(ReasonCode.WAITING_FOR_VICTIMS, {"victims": [other], "region": "north"})
    world.set_phase(id_, Phase.PLACING, reason=reason)
    found = await get(world, f"/v1/workloads/{id_}", key="vision")
    assert found["labels"] == {"after": other}
    assert other not in json.dumps(found["reason"])
