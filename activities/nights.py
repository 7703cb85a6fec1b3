"""A night's plan: gather, solve in a process of its own, keep what was decided, and write down the moves."""

import contextlib
import json
import logging
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterable
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, delete, func, insert, select
from sqlalchemy.orm import Session
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.night_moves import moves_of, tidy
from domain import ids
from domain.nights import NightRef, NightTicket
from domain.protocol import Activity
from infra.config import Settings, TetrisSettings
from infra.db import events
from infra.db.gathering import gather
from infra.db.models import Region
from infra.db.nights import OPEN, Night, NightMove, NightPause, begin_night, quota_left_bytes
from infra.db.session import transaction
from infra.errors import CatalogueError
from infra.stack.supervisor import dies_with_parent
from mizzen.objects.store import ObjectStore, open_store
from tetris.columns import Columns
from tetris.folders import write_folder

_log = logging.getLogger(__name__)
_ROWS = 5000
_BEAT_S = 10.0
_LAST_LINES = 20
_SAID_CHARACTERS = 2000


class NightActivities:
    """Effects of the workflow of a night, but for its moves (`activities.moves`)."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings

    @activity.defn(name=Activity.OPEN_NIGHT.value)
    def open_night(self, ref: NightRef) -> NightTicket:
        """What is to be done of the night: nothing if another one is open."""
        nightly = self._settings.tetris.nightly
        with transaction(self._engine) as session:
            row = session.get(Night, ref.night, with_for_update=True)
            if row is None:
                row = begin_night(session, ref.night, nightly.deadline_s, dry_run=False)
            if row is None:
                _log.warning("night %s: another one is open; nothing is done", ref.night)
                return NightTicket("skipped")
            return NightTicket(row.state, nightly.at_once, nightly.solve_s)

    @activity.defn(name=Activity.PLAN_NIGHT.value)
    def plan_night(self, ref: NightRef) -> None:
        """Decides what the night moves, unless that is written down already.

        Raises:
            ApplicationError: the catalogue does not suffice; it says what is missing.
        """
        tetris = self._settings.tetris
        with transaction(self._engine) as session:
            night = session.get_one(Night, ref.night)
            if night.state != "planning":
                return
        try:
            with transaction(self._engine, isolation="REPEATABLE READ") as session:
                quota = quota_left_bytes(session, tetris.nightly)
                instance = gather(session, tetris, move_quota_bytes=quota)
                store, url = _bucket(session, ref.night)
        except CatalogueError as error:
            raise ApplicationError(str(error), type="CatalogueError", non_retryable=True) from None
        activity.heartbeat("gathered")
        with tempfile.TemporaryDirectory(prefix="mizzen-night-") as name:
            folder = Path(name)
            write_folder(Columns.of(instance), folder / "instance")
            del instance
            (folder / "request.json").write_text(json.dumps(_request(tetris)))
            _solve(folder)
            for path in sorted(p for p in folder.rglob("*") if p.is_file()):
                store.put(ids.night_prefix(ref.night) + str(path.relative_to(folder)), path.read_bytes())
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
        """Whether an operator has paused moves."""
        with transaction(self._engine) as session:
            return session.get(NightPause, True) is not None

    @activity.defn(name=Activity.END_NIGHT.value)
    def end_night(self, ref: NightRef) -> None:
        """Ends the night: what waits is left to the next one, which carries nothing over but plans anew."""
        with transaction(self._engine) as session:
            night = session.get(Night, ref.night, with_for_update=True)
            if night is None or night.state not in OPEN:
                return
            because = "it was a dry run" if night.dry_run else "the deadline was over before it could begin"
            waiting = NightMove.night == ref.night, NightMove.state == "waiting"
            for move in session.scalars(select(NightMove).where(*waiting)):
                move.state, move.left_because = "left", because
            night.state, night.problem = ("ended", None) if ref.problem is None else ("failed", ref.problem)
            night.ended_at = func.clock_timestamp()
            detail = {"night": ref.night, "problem": ref.problem, "moves": _count(session, ref.night)}
            events.record(session, f"night.{night.state}", detail=detail)


def _count(session: Session, night: str) -> dict[str, int]:
    rows = session.execute(
        select(NightMove.state, func.count()).where(NightMove.night == night).group_by(NightMove.state)
    )
    return {state: int(count) for state, count in rows}


def _bucket(session: Session, night: str) -> tuple[ObjectStore, str]:
    url = session.scalars(select(Region.bucket_url).order_by(Region.name)).first()
    if url is None:
        raise CatalogueError("regions: there are none; add one with a bucket first")
    return open_store(url), f"{url.rstrip('/')}/{ids.night_prefix(night)}"


def _request(tetris: TetrisSettings) -> dict[str, Any]:
    return {"time_s": tetris.nightly.solve_s, "seed": 0, "policy": tetris.replicas.model_dump(mode="json")}


def _solve(folder: Path) -> None:
    """Runs `python -m tetris`, heartbeats what it says, and ends it where the activity is cancelled."""
    command = [*dies_with_parent("KILL"), sys.executable, "-m", "tetris", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
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
                activity.heartbeat(far[0])
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_BEAT_S)
        finally:
            process.kill()
            for reader in readers:
                reader.join()
    if process.returncode != 0:
        said = "".join(told).strip()[-_SAID_CHARACTERS:]
        raise ApplicationError(f"the search ended with {process.returncode}: {said}", type="SearchFailed")


def _newest(lines: Iterable[str], far: list[str]) -> None:
    for line in lines:
        far[0] = line.strip()


def forget_nights(engine: Engine, keep_s: float) -> None:
    """Deletes what nights decided that ended so long ago, and its objects."""
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
