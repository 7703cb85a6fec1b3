"""What a provider's list says about waits and ends, and what follows from it."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine
from temporalio.client import Client

from activities.capacity.observations import observe
from activities.lifecycle.machines import give_notice
from capacity.provider import FoundMachine
from domain.lifecycle.instances import InstancePhase
from domain.reasons import Reason, ReasonCode
from domain.task_reports import NoticeReport
from infra.db.models import Machine
from tests.capacity.site import Site


async def test_a_machine_may_wait_at_its_provider(
    database: Engine, database_url: str, client: Client, tmp_path: Path
) -> None:
    """The limit for joining begins when the machine has started; until then the instance has the provider's words."""
    async with Site.open(database, database_url, client, tmp_path, join_s=1.0) as site:
        site.provider.queues, site.agents.silent = True, True
        starts_at_s = time.time() + 3600
        site.provider.says = lambda one: replace(one, waits="pending, Priority", starts_at_s=starts_at_s)
        site.pool(1)
        await site.rounds_until(lambda: _code(site) == "pending_at_provider", "the instance waits at its provider")
        await asyncio.sleep(1.5)
        (row,) = site.rows()
        assert row.reason is not None
        assert row.expected_at is not None
        assert "pending, Priority" in row.reason["sentence"]
        assert row.expected_at.timestamp() == pytest.approx(starts_at_s, abs=1)
        assert (row.phase, row.started_at) == ("joining", None)
        site.provider.says = lambda one: one
        await site.rounds_until(lambda: _code(site) == "awaiting_agent", "the machine has started")
        await site.rounds_until(lambda: len(site.rows()) == 2, "its agent did not come in time")


def _code(site: Site) -> str | None:
    return next((str(row.reason["code"]) for row in site.rows() if row.reason is not None), None)


async def test_a_known_end_keeps_work_away_then_gives_notice(site: Site) -> None:
    """Near its end a machine gets no new work, unless the end moves away; then it gets notice and is replaced."""
    site.pool(1)
    await site.rounds_until(lambda: site.phases().get("ready") == 1, "one instance is ready")
    (first,) = site.rows()

    def cordon() -> str | None:
        with site.world.session() as session:
            found = session.get_one(Machine, first.machine).cordon
        return None if found is None else str(found["code"])

    def ends_in(left_s: float) -> None:
        ends_at_s = time.time() + left_s
        site.provider.says = lambda one: replace(one, ends_at_s=ends_at_s) if one.native_id == first.native_id else one

    ends_in(site.settings.capacity.no_work_s - 5)
    await site.rounds_until(lambda: cordon() == "ends_soon", "the machine gets no new work")
    ends_in(site.settings.capacity.no_work_s + 3600)
    await site.rounds_until(lambda: cordon() is None, "its end has moved away")
    ends_in(site.settings.capacity.leave_s - 5)
    await site.rounds_until(lambda: site.phases() == {"ready": 1, "gone": 1}, "it is replaced before its end")
    (gone,) = site.rows(InstancePhase.GONE)
    assert gone.reason is not None
    assert (gone.id, gone.reason["code"]) == (first.id, "platform_notice")


async def test_what_is_to_be_left_or_has_ended_has_its_reason(site: Site) -> None:
    """A machine that its provider wants to be left is drained; one that has ended is replaced at once."""
    said = {"leaves": "node n1 is being drained (its fan)"}
    for code, words in (("left_at_provider", said), ("ended_at_provider", {"ended": "node n1 has failed"})):
        site.provider.says = lambda one: one
        site.pool(1)
        await site.rounds_until(lambda: site.phases().get("ready") == 1, "one instance is ready")
        (row,) = site.rows(InstancePhase.READY)
        site.provider.says = lambda one, row=row, words=words: (  # type: ignore[misc]
            replace(one, **words) if one.native_id == row.native_id else one
        )
        await site.rounds_until(
            lambda row=row: row.id in {one.id for one in site.rows(InstancePhase.GONE)},  # type: ignore[misc]
            "its instance is gone",
        )
        found = next(one.reason for one in site.rows() if one.id == row.id)
        assert found is not None
        assert found["code"] == code
        assert next(iter(words.values())) in found["sentence"]


async def test_an_earlier_end_replaces_that_of_a_notice(site: Site) -> None:
    """The agent gave notice with the usual time; the provider knows that less is left, and the tasks get that."""
    site.pool(1)
    await site.rounds_until(lambda: site.phases().get("ready") == 1, "one instance is ready")
    (row,) = site.rows()
    assert row.machine is not None
    now_s = time.time()
    notice = NoticeReport("kubernetes", "stop", True, now_s, now_s + 600, "SIGTERM")
    with site.world.session() as session:
        machine = session.get_one(Machine, row.machine)
        give_notice(session, machine, Reason(ReasonCode.PLATFORM_NOTICE, {"machine": machine.id, **notice.numbers()}))
    found = FoundMachine(str(row.native_id), row.id, now_s, ends_at_s=now_s + 50, leaves="Evicted: for its node")
    settings = site.settings.capacity.model_copy(update={"leave_s": 60})
    for late_s, expected_s in ((900, now_s + 600), (0, now_s + 50)):
        said = replace(found, ends_at_s=now_s + 50 + late_s)
        await asyncio.to_thread(observe, site.world.engine, settings, site.provider, [said])
        with site.world.session() as session:
            kept = session.get_one(Machine, row.machine).notice
        assert kept is not None
        assert kept["detail"]["ends_at_s"] == expected_s
    assert kept["detail"]["words"] == "Evicted: for its node"
