"""Workers and Temporal are killed at random while instances come and go, and provider responses fail at random.

In the end the provider must have exactly the instances of the ledger. `make test-all` makes six kills;
`make chaos-instances` makes 200 for each kind of provider. `MIZZEN_CHAOS_ROUNDS` is the number of kills divided by 20.
"""

import asyncio
import os
import random
import subprocess
from pathlib import Path

import pytest
from sqlalchemy import Engine, select

from capacity.providers.trace.cloud import Cloud
from capacity.providers.trace.settings import TraceProviderSettings
from infra.config.scheduling import CapacitySettings
from infra.config.services import TemporalSettings
from infra.db.capacity import InstanceRow, PoolRow
from infra.db.logs import Event
from infra.keys import load_master_key
from infra.stack.ports import free_port
from infra.stack.temporal import command, find_binary
from tests.activities.victims import victim
from tests.activities.world import World
from tests.capacity.site import CLOUD, Agents

ROUNDS = int(os.environ.get("MIZZEN_CHAOS_ROUNDS", "0"))
KILLS = 20 * ROUNDS or 6
LONGEST_RUN_S = 2.5
PATIENCE_S = 240.0
LEFT = 2
"""Number of machines at the end."""


class Temporal:
    """A dev server with its state in a file that is killed and restarted."""

    def __init__(self, folder: Path) -> None:
        self.settings, self._port = TemporalSettings(), free_port()
        self.address = f"127.0.0.1:{self._port}"
        self._state = folder / "temporal.db"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the server, which responds about a second later."""
        what = command(find_binary(self.settings), self._state, self.settings, self._port)
        self._process = subprocess.Popen(what, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self, *, forgets: bool = False) -> None:
        """Sends SIGKILL; with `forgets`, deletes the state too."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if forgets:
            for path in self._state.parent.glob("temporal.db*"):
                path.unlink()


def _live(world: World) -> dict[str, str | None]:
    """Returns the ledger's live instances with the provider's ids."""
    with world.session() as session:
        rows = session.execute(select(InstanceRow.id, InstanceRow.native_id).where(InstanceRow.gone_at.is_(None)))
        return {row.id: row.native_id for row in rows}


def _phases(world: World) -> set[str]:
    with world.session() as session:
        return set(session.scalars(select(InstanceRow.phase).where(InstanceRow.gone_at.is_(None))))


def _size(world: World, size: int) -> None:
    with world.session() as session:
        row = session.get(PoolRow, ("west", "burst")) or PoolRow(region="west", name="burst")
        session.add(row)
        row.size = size


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "knows_tokens",
    [
        pytest.param(True, id="a provider with client tokens", marks=pytest.mark.long),
        pytest.param(False, id="one without", marks=pytest.mark.long),
    ],
)
async def test_in_the_end_the_provider_has_what_the_ledger_says(
    database: Engine, database_url: str, tmp_path: Path, checkout: Path, knows_tokens: bool
) -> None:
    """Every machine belongs to an instance in the ledger; with client tokens no machine was launched twice."""
    chance = random.Random(KILLS)
    temporal = Temporal(tmp_path)
    cloud = {**CLOUD, "zones": {zone: {**of, "most": 4} for zone, of in CLOUD["zones"].items()}}
    world = World(database, tmp_path)
    world.settings = world.settings.model_copy(
        update={
            "database": database_url,
            "temporal": temporal.settings.model_copy(update={"address": temporal.address}),
            "providers": {"sim": {"kind": "trace", **cloud}},
            "capacity": CapacitySettings(interval_s=0.3, join_s=30, drain_s=5, lost_after_s=5, refused_pause_s=1),
            "reconcile": world.settings.reconcile.model_copy(
                update={"interval_s": 0.5, "disagree_s": 1.0, "singletons_s": 1.0}
            ),
        }
    )
    load_master_key(world.settings.master_key_path, create=True)
    world.region("west")
    machines = Cloud(TraceProviderSettings.model_validate(cloud), tmp_path / "providers" / "sim")
    agents = asyncio.create_task(Agents(world, machines).run())
    temporal.start()
    try:
        unreliable = {"share": 0.3, "knows_tokens": knows_tokens}
        with victim(world.settings, ["west"], checkout, unreliable=unreliable) as run:
            for _ in range(KILLS):
                _size(world, chance.randrange(6))
                killing = asyncio.create_task(_kill_temporal(temporal, chance)) if chance.random() < 0.3 else None
                await asyncio.to_thread(run, chance.random() * LONGEST_RUN_S)
                if killing is not None:
                    await killing
            _size(world, LEFT)
            last: list[object] = []

            def settled() -> bool:
                live, there = _live(world), {one.instance.native_id for one in machines.there()}
                last[:] = live, there
                return len(live) == LEFT and set(live.values()) == there and _phases(world) == {"ready"}

            try:
                await asyncio.to_thread(run, None, settled, PATIENCE_S)
            except AssertionError as error:
                raise AssertionError(f"{error}; instances in the ledger and at the provider: {last}") from None
    finally:
        agents.cancel()
        await asyncio.wait([agents])
        temporal.kill()
    launched = [path.stem.removeprefix("tr-") for path in (tmp_path / "providers" / "sim" / "machines").glob("*.json")]
    requested = {token.partition(".")[0] for token in launched}
    with world.session() as session:
        known = set(session.scalars(select(InstanceRow.id)))
        without_owner = session.scalars(select(Event.detail).where(Event.kind == "instance.without_owner")).all()
    assert requested <= known
    twice = len(launched) - len(requested)
    print(f"{KILLS} kills: {len(known)} requests, {len(launched)} launches, {twice} duplicates,", end=" ")
    print(f"{len(without_owner)} machines without an owner ended")
    if knows_tokens:
        assert twice == 0


async def _kill_temporal(temporal: Temporal, chance: random.Random) -> None:
    await asyncio.sleep(chance.random() * LONGEST_RUN_S / 2)
    await asyncio.to_thread(temporal.kill, forgets=chance.random() < 0.3)
    temporal.start()
