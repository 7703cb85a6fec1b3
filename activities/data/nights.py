"""The plan of a night: gathers the catalogue, solves in a separate process, and stores the result and the moves."""

import json
import logging
from collections.abc import Callable
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, delete, func, insert, select, update
from sqlalchemy.orm import Session
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.data.night_moves import droppable_replicas, moves_of, tidy
from activities.data.searching import searched
from activities.heartbeat import heartbeating
from domain import ids
from domain.nights import NightRef, NightTicket
from domain.protocol import Activity
from domain.reads import Reads
from infra.config import Settings
from infra.db import events
from infra.db.datacenters import assign_partitions, gather_datacenters
from infra.db.gathering import gather, transaction_time
from infra.db.models import Datacenter, Region
from infra.db.nights import OPEN, Night, NightMove, NightPause, begin_night, moves_by_state, quota_left_bytes
from infra.db.reads import partial_reads
from infra.db.session import transaction
from infra.errors import CatalogueError
from mizzen.objects.store import ObjectStore, open_store

_log = logging.getLogger(__name__)
_ROWS = 5000
_BEAT_S = 10.0
_LAST_LINES = 20
_SAID_CHARACTERS = 2000


class NightActivities:
    """The activities of a night's workflow, except its moves (`activities.data.moves`)."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings

    @activity.defn(name=Activity.OPEN_NIGHT.value)
    def open_night(self, ref: NightRef) -> NightTicket:
        """Opens the night, if no other night is open; returns its state and settings."""
        nightly = self._settings.tetris.nightly
        with transaction(self._engine) as session:
            row = session.get(Night, ref.night, with_for_update=True)
            if row is None:
                row = begin_night(session, ref.night, nightly.deadline_s, dry_run=False)
            if row is None:
                _log.warning("night %s is skipped: another night is open", ref.night)
                return NightTicket("skipped")
            return NightTicket(row.state, nightly.at_once, nightly.solve_s)

    @activity.defn(name=Activity.PLAN_NIGHT.value)
    def plan_night(self, ref: NightRef) -> None:
        """Computes and writes the moves of the night, unless they are already written.

        Raises:
            ApplicationError: the catalogue is incomplete; the message says what is missing.
        """
        tetris = self._settings.tetris
        with transaction(self._engine) as session:
            night = session.get_one(Night, ref.night)
            if night.state != "planning":
                return
        with heartbeating() as heartbeat:
            try:
                with transaction(self._engine, isolation="REPEATABLE READ") as session:
                    quota = quota_left_bytes(session, tetris.nightly)
                    instance = gather(session, tetris, move_quota_bytes=quota)
                    reads = partial_reads(session, transaction_time(session), tetris.window_days)
                    droppable = [list(pair) for pair in droppable_replicas(session)]
                    store, url = _bucket(session, ref.night)
            except CatalogueError as error:
                raise ApplicationError(str(error), type="CatalogueError", non_retryable=True) from None
            request = {
                "time_s": tetris.nightly.solve_s, "seed": 0, "policy": tetris.replicas.model_dump(mode="json"),
                "droppable": droppable,
            }  # fmt: skip
            with searched(instance, reads, request, store, ids.night_prefix(ref.night), heartbeat) as folder:
                report = json.loads((folder / "report.json").read_text())
                with transaction(self._engine) as session:
                    self._write(session, ref.night, folder, report, url)

    def _write(self, session: Session, ref: str, folder: Path, report: dict[str, Any], url: str) -> None:
        night = session.get_one(Night, ref, with_for_update=True)
        if night.state != "planning":
            return
        session.execute(delete(NightMove).where(NightMove.night == ref))
        moves = enumerate(moves_of(session, folder, quota_left_bytes(session, self._settings.tetris.nightly)), 1)
        while rows := list(islice(moves, _ROWS)):
            session.execute(insert(NightMove), [{"night": ref, "number": number, **move} for number, move in rows])
        if not night.dry_run:
            tidy(session, ref, self._settings.tetris.nightly.grace_s)
        night.report, night.artifact_url, night.planned_at = report, url, func.clock_timestamp()
        night.state = "moving"
        events.record(session, "night.planned", detail={"night": ref, "moves": _count(session, ref)})

    @activity.defn(name=Activity.NIGHTS_PAUSED.value)
    def nights_paused(self, _: None = None) -> bool:
        """Returns whether an operator has paused moves."""
        with transaction(self._engine) as session:
            return session.get(NightPause, True) is not None

    @activity.defn(name=Activity.ASSIGN_PARTITIONS.value)
    def assign_partitions(self, ref: NightRef) -> None:
        """Assigns the partitions of each region with datacenters to these datacenters (MAST 3.5), after the moves.

        If the catalogue lacks data about a region, an event reports it and its assignment does not change.
        """
        tetris = self._settings.tetris
        with transaction(self._engine) as session:
            night = session.get(Night, ref.night)
            if night is None or night.state != "moving" or night.dry_run:
                return
            regions = session.scalars(select(Datacenter.region).distinct().order_by(Datacenter.region)).all()
            store, _ = _bucket(session, ref.night)
        with heartbeating() as heartbeat:
            for region in regions:
                prefix = f"{ids.night_prefix(ref.night)}datacenters/{region}/"
                self._assign(region, store, prefix, tetris.nightly.solve_s / len(regions), heartbeat)

    def _assign(
        self, region: str, store: ObjectStore, prefix: str, time_s: float, heartbeat: Callable[[str], None]
    ) -> None:
        tetris = self._settings.tetris
        try:
            with transaction(self._engine, isolation="REPEATABLE READ") as session:
                instance = gather_datacenters(session, region, tetris)
            request = {"time_s": time_s, "seed": 0, "policy": None}
            with searched(instance, Reads(), request, store, prefix, heartbeat) as folder:
                plan = json.loads((folder / "plan.json").read_text())["homes"]
            with transaction(self._engine) as session:
                # Tables that do not move are written, too: they may not have been assigned to a datacenter before.
                assign_partitions(session, {table.name: table.home for table in instance.tables} | plan)
        except CatalogueError as error:
            with transaction(self._engine) as session:
                events.record(session, "datacenters.left", region=region, detail={"problem": str(error)})

    @activity.defn(name=Activity.END_NIGHT.value)
    def end_night(self, ref: NightRef) -> None:
        """Ends the night. Waiting moves are left out; the next night makes a new plan."""
        with transaction(self._engine) as session:
            night = session.get(Night, ref.night, with_for_update=True)
            if night is None or night.state not in OPEN:
                return
            because = "the night was a dry run" if night.dry_run else "the deadline passed before the move began"
            waiting = NightMove.night == ref.night, NightMove.state == "waiting"
            session.execute(update(NightMove).where(*waiting).values(state="left", left_because=because))
            night.state, night.problem = ("ended", None) if ref.problem is None else ("failed", ref.problem)
            night.ended_at = func.clock_timestamp()
            detail = {"night": ref.night, "problem": ref.problem, "moves": _count(session, ref.night)}
            events.record(session, f"night.{night.state}", detail=detail)


def _count(session: Session, night: str) -> dict[str, int]:
    return {state: count for state, (count, _) in moves_by_state(session, [night])[night].items()}


def _bucket(session: Session, night: str) -> tuple[ObjectStore, str]:
    url = session.scalars(select(Region.bucket_url).order_by(Region.name)).first()
    if url is None:
        raise CatalogueError("regions: there is no region; add one with a bucket first")
    return open_store(url), f"{url.rstrip('/')}/{ids.night_prefix(night)}"


def forget_nights(engine: Engine, keep_s: float) -> None:
    """Deletes the records and objects of nights that ended more than `keep_s` seconds ago."""
    old = Night.ended_at < func.now() - timedelta(seconds=keep_s)
    with transaction(engine) as session:
        nights = {row.id: row.artifact_url for row in session.scalars(select(Night).where(old))}
    for night, url in nights.items():
        if url is not None:
            store = open_store(url.removesuffix("/" + ids.night_prefix(night)))
            for info in list(store.list(ids.night_prefix(night))):
                store.delete(info.key)
        with transaction(engine) as session:
            session.execute(delete(Night).where(Night.id == night))
