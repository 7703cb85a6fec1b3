"""Departures of owners' machines in the past, for the hazards of region `r`."""

from sqlalchemy import text

from activities.reclaim.pacing import Pacer
from domain.protocol.machines import Pace
from infra.db.reclaim import SiteHazard
from tests.activities.world import World

_DEPARTED = text(
    "insert into event (kind, region, machine, reason) values ('machine.notice', 'r', :machine, jsonb_build_object("
    "'code', 'platform_notice', 'detail', jsonb_build_object('platform', 'owner', 'at_s', extract(epoch from now()),"
    " 'ends_at_s', extract(epoch from now()))))"
)


def depart(world: World, *machines: str) -> None:
    """Records that the owners of machines have taken them back without notice, just now."""
    with world.session() as session:
        for machine in machines:
            session.execute(_DEPARTED, {"machine": machine})


def paces(world: World) -> dict[str, Pace]:
    """Runs a control period; returns what each machine is told."""
    return {pace.machine: pace for pace in Pacer(world.engine, world.settings, None).paces()}  # type: ignore[arg-type]


def pass_hours(world: World, hours: float) -> None:
    """Lets time pass: moves everything that was recorded into the past."""
    with world.session() as session:
        session.execute(text("update event set at = at - make_interval(secs => :s)"), {"s": hours * 3600})
        row = session.get_one(SiteHazard, "r")
        row.counts, row.noticed = (
            None if counts is None else counts | {key: counts[key] - hours * 3600 for key in ("now_s", "row_from_s")}
            for counts in (row.counts, row.noticed)
        )


def departs_each_hour(world: World, *machines: str, hours: int = 4) -> None:
    """Lets hours pass, in each of which these machines depart."""
    for _ in range(hours):
        pass_hours(world, 1.0)
        depart(world, *machines)
        paces(world)
