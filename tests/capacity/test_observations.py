"""What a provider's list says about waits and ends, and what follows from it."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine
from temporalio.client import Client

from domain.lifecycle.instances import InstancePhase
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
    rows = site.rows()
    return str(rows[0].reason["code"]) if rows and rows[0].reason else None


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
