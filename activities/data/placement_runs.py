"""The plan of a placement run: gathers the catalogue, solves in a separate process, and stores the result and the
moves.
"""

import contextlib
import json
import logging
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, delete, func, insert, select, update
from sqlalchemy.orm import Session
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.data.placement_moves import droppable_replicas, moves_of, tidy
from activities.heartbeat import heartbeating
from domain import ids
from domain.instance import Reads, TetrisInstance, reads_document
from domain.placement_runs import PlacementRunRef, PlacementRunTicket
from domain.protocol.activities import Activity
from infra import children
from infra.config.settings import Settings
from infra.db import events
from infra.db.datacenters import assign_partitions, gather_datacenters
from infra.db.models import Datacenter, Region
from infra.db.placement_instance import gather, transaction_time
from infra.db.placement_runs import (
    OPEN,
    PlacementMove,
    PlacementPause,
    PlacementRun,
    begin_placement_run,
    moves_by_state,
    quota_left_bytes,
)
from infra.db.reads import partial_reads
from infra.db.session import transaction
from infra.errors import CatalogueError
from infra.stack.supervisor import dies_with_parent
from mizzen.objects.store import ObjectStore
from mizzen.objects.urls import open_store
from tetris.columns import Columns
from tetris.folders import write_folder

_log = logging.getLogger(__name__)
_ROWS = 5000


class PlacementRunActivities:
    """The activities of a placement run's workflow, except its moves (`activities.data.moves`)."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings

    @activity.defn(name=Activity.OPEN_PLACEMENT_RUN.value)
    def open_placement_run(self, ref: PlacementRunRef) -> PlacementRunTicket:
        """Opens the placement run, if no other placement run is open; returns its state and settings."""
        nightly = self._settings.tetris.nightly
        with transaction(self._engine) as session:
            row = session.get(PlacementRun, ref.placement_run, with_for_update=True)
            if row is None:
                row = begin_placement_run(session, ref.placement_run, nightly.deadline_s, dry_run=False)
            if row is None:
                _log.warning("placement run %s is skipped: another placement run is open", ref.placement_run)
                return PlacementRunTicket("skipped")
            return PlacementRunTicket(row.state, nightly.at_once, nightly.solve_s)

    @activity.defn(name=Activity.PLAN_PLACEMENT_RUN.value)
    def plan_placement_run(self, ref: PlacementRunRef) -> None:
        """Computes and writes the moves of the placement run, unless they are already written.

        Raises:
            ApplicationError: the catalogue is incomplete; the message says what is missing.
        """
        tetris = self._settings.tetris
        with transaction(self._engine) as session:
            placement_run = session.get_one(PlacementRun, ref.placement_run)
            if placement_run.state != "planning":
                return
        with heartbeating() as heartbeat:
            try:
                with transaction(self._engine, isolation="REPEATABLE READ") as session:
                    quota = quota_left_bytes(session, tetris.nightly)
                    instance = gather(session, tetris, move_quota_bytes=quota)
                    reads = partial_reads(session, transaction_time(session), tetris.window_days)
                    droppable = [list(pair) for pair in droppable_replicas(session)]
                    store, url = _bucket(session, ref.placement_run)
            except CatalogueError as error:
                raise ApplicationError(str(error), type="CatalogueError", non_retryable=True) from None
            request = {
                "time_s": tetris.nightly.solve_s, "seed": 0, "policy": tetris.replicas.model_dump(mode="json"),
                "droppable": droppable,
            }  # fmt: skip
            with searched(
                instance, reads, request, store, ids.placement_run_prefix(ref.placement_run), heartbeat
            ) as folder:
                report = json.loads((folder / "report.json").read_text())
                with transaction(self._engine) as session:
                    self._write(session, ref.placement_run, folder, report, url)

    def _write(self, session: Session, ref: str, folder: Path, report: dict[str, Any], url: str) -> None:
        placement_run = session.get_one(PlacementRun, ref, with_for_update=True)
        if placement_run.state != "planning":
            return
        session.execute(delete(PlacementMove).where(PlacementMove.placement_run == ref))
        moves = enumerate(moves_of(session, folder, quota_left_bytes(session, self._settings.tetris.nightly)), 1)
        while rows := list(islice(moves, _ROWS)):
            session.execute(
                insert(PlacementMove), [{"placement_run": ref, "number": number, **move} for number, move in rows]
            )
        if not placement_run.dry_run:
            tidy(session, ref, self._settings.tetris.nightly.grace_s)
        placement_run.report, placement_run.artifact_url, placement_run.planned_at = report, url, func.clock_timestamp()
        placement_run.state = "moving"
        events.record(session, "placement_run.planned", detail={"placement_run": ref, "moves": _count(session, ref)})

    @activity.defn(name=Activity.PLACEMENT_PAUSED.value)
    def placement_paused(self, _: None = None) -> bool:
        """Returns whether an operator has paused moves."""
        with transaction(self._engine) as session:
            return session.get(PlacementPause, True) is not None

    @activity.defn(name=Activity.ASSIGN_PARTITIONS.value)
    def assign_partitions(self, ref: PlacementRunRef) -> None:
        """Assigns the partitions of each region with datacenters to these datacenters (MAST 3.5), after the moves.

        If the catalogue lacks data about a region, an event reports it and its assignment does not change.
        """
        tetris = self._settings.tetris
        with transaction(self._engine) as session:
            placement_run = session.get(PlacementRun, ref.placement_run)
            if placement_run is None or placement_run.state != "moving" or placement_run.dry_run:
                return
            regions = session.scalars(select(Datacenter.region).distinct().order_by(Datacenter.region)).all()
            store, _ = _bucket(session, ref.placement_run)
        with heartbeating() as heartbeat:
            for region in regions:
                prefix = f"{ids.placement_run_prefix(ref.placement_run)}datacenters/{region}/"
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

    @activity.defn(name=Activity.END_PLACEMENT_RUN.value)
    def end_placement_run(self, ref: PlacementRunRef) -> None:
        """Ends the placement run. Waiting moves are left out; the next placement run makes a new plan."""
        with transaction(self._engine) as session:
            placement_run = session.get(PlacementRun, ref.placement_run, with_for_update=True)
            if placement_run is None or placement_run.state not in OPEN:
                return
            because = (
                "the placement run was a dry run"
                if placement_run.dry_run
                else "the deadline passed before the move began"
            )
            waiting = PlacementMove.placement_run == ref.placement_run, PlacementMove.state == "waiting"
            session.execute(update(PlacementMove).where(*waiting).values(state="left", left_because=because))
            placement_run.state, placement_run.problem = (
                ("ended", None) if ref.problem is None else ("failed", ref.problem)
            )
            placement_run.ended_at = func.clock_timestamp()
            detail = {
                "placement_run": ref.placement_run,
                "problem": ref.problem,
                "moves": _count(session, ref.placement_run),
            }
            events.record(session, f"placement_run.{placement_run.state}", detail=detail)


def _count(session: Session, placement_run: str) -> dict[str, int]:
    return {state: count for state, (count, _) in moves_by_state(session, [placement_run])[placement_run].items()}


def _bucket(session: Session, placement_run: str) -> tuple[ObjectStore, str]:
    url = session.scalars(select(Region.bucket_url).order_by(Region.name)).first()
    if url is None:
        raise CatalogueError("regions: there is no region; add one with a bucket first")
    return open_store(url), f"{url.rstrip('/')}/{ids.placement_run_prefix(placement_run)}"


def forget_placement_runs(engine: Engine, keep_s: float) -> dict[str, str]:
    """Deletes the records of placement runs that ended more than `keep_s` seconds ago, if they have no objects.

    Returns the others by id, with the URL of the store of their objects, for `forget_placement_run`.
    """
    old = PlacementRun.ended_at < func.now() - timedelta(seconds=keep_s)
    with transaction(engine) as session:
        session.execute(delete(PlacementRun).where(old, PlacementRun.artifact_url.is_(None)))
        rows = session.scalars(select(PlacementRun).where(old)).all()
        urls = {row.id: row.artifact_url or "" for row in rows}
    return {id_: url.removesuffix("/" + ids.placement_run_prefix(id_)) for id_, url in urls.items()}


def forget_placement_run(store: ObjectStore, engine: Engine, placement_run: str) -> None:
    """Deletes the objects of a placement run, then its record."""
    for info in list(store.list(ids.placement_run_prefix(placement_run))):
        store.delete(info.key)
    with transaction(engine) as session:
        session.execute(delete(PlacementRun).where(PlacementRun.id == placement_run))


_LOOK_S = 1.0
_LAST_LINES = 20
_SAID_CHARACTERS = 2000


@contextlib.contextmanager
def searched(
    instance: TetrisInstance,
    reads: Reads,
    request: Mapping[str, Any],
    store: ObjectStore,
    prefix: str,
    report: Callable[[str], None],
) -> Iterator[Path]:
    """Runs the search and yields the folder with its result. All files are also stored under `prefix` in the store.

    `report` is called with the progress of the search.

    Raises:
        ApplicationError: the search failed; the message contains the end of its error output.
    """
    with tempfile.TemporaryDirectory(prefix="mizzen-search-") as name:
        folder = Path(name)
        write_folder(Columns.of(instance), folder / "instance")
        (folder / "reads.json").write_text(json.dumps(reads_document(reads)))
        (folder / "request.json").write_text(json.dumps(request))
        _solve(folder, report)
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            store.put(prefix + str(path.relative_to(folder)), path.read_bytes())
        yield folder


def _solve(folder: Path, report: Callable[[str], None]) -> None:
    """Runs `python -m tetris` and reports its progress. Kills it if the activity is cancelled."""
    command = [*dies_with_parent("KILL"), *children.python("-m", "tetris", str(folder))]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=children.environment()
    ) as process:
        far = ["starting"]
        told: deque[str] = deque(maxlen=_LAST_LINES)
        readers = [
            threading.Thread(target=take, args=(stream,), daemon=True)
            for take, stream in ((lambda lines: _newest(lines, far), process.stdout), (told.extend, process.stderr))
        ]
        for reader in readers:
            reader.start()
        try:
            while process.poll() is None:
                report(far[0])
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_S)
        finally:
            process.kill()
            for reader in readers:
                reader.join()
    if process.returncode != 0:
        said = "".join(told).strip()[-_SAID_CHARACTERS:]
        raise ApplicationError(f"the search failed with exit code {process.returncode}: {said}", type="SearchFailed")


def _newest(lines: Iterable[str], far: list[str]) -> None:
    for line in lines:
        far[0] = line.strip()
