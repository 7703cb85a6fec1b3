"""A random walk through the operations of an installation."""

import random
from collections.abc import Callable

from sqlalchemy import select

from domain.protocol.workload_messages import MessageKind
from infra.db import outbox
from infra.db.models import Allocation, Machine, Workload
from tests.activities.workflow_simulations import Lives
from tests.activities.world import World, job

FLEET = {"east/c/m1": 4, "east/c/m2": 4, "west/c/m1": 2, "west/d/m1": 4}
SMALL = {f"east/c/m{n}": 2 for n in range(1, 8)}
"""Machines on which most gangs use several, so that they can be repaired in place."""

TENANTS = {"t": (4, 6), "high": (1, 10), "poor": (6, 2)}


class Walk:
    """Random operations on an installation."""

    def __init__(self, world: World, seed: int, fleet: dict[str, int]) -> None:
        self.world, self.fleet = world, fleet
        self.chance = random.Random(seed)
        self.lives = Lives(world, self.chance)
        self.boots = dict.fromkeys(self.fleet, 1)
        world.configure(repair=True)
        for region in ("east", "west"):
            world.region(region)
        for machine, gpus in self.fleet.items():
            world.machine(machine, gpus)
        for name, (level, gpus) in TENANTS.items():
            world.tenant(name, level, gpus)
        steps: dict[Callable[[], None], int] = {
            self.submit: 8, self.tick: 10, self.live: 12, self.cancel: 1, self.lose: 1, self.come_back: 4,
            self.lower: 1, self.reboot: 1, self.cordon: 1, self.uncordon: 4, self.drain: 1, self.hold: 1,
            self.let_go: 2, self.confirm: 4,
        }  # fmt: skip
        for _ in range(8):
            self.submit()
        self.lives.fetch()
        self._steps = [step for step, weight in steps.items() for _ in range(weight)]

    def step(self) -> None:
        """Runs one random operation."""
        self.chance.choice(self._steps)()
        self.lives.fetch()

    def submit(self) -> None:
        jobs = [
            job(f"j{i}", tasks=self.chance.choice([1, 1, 2, 3]), gpus=self.chance.choice([0, 1, 1, 2]), cpus_milli=2000)
            for i in range(self.chance.choice([1, 1, 1, 2]))
        ]
        if len(jobs) == 1 and self.chance.random() < 0.4:
            jobs = [jobs[0].model_copy(update={"most_tasks": jobs[0].tasks + self.chance.choice([1, 2, 5])})]
        by = self.chance.choice(["ann", "bob", "cleo"])
        self.world.submit(*jobs, tenant=self.chance.choice(["high", "high", "poor", "t"]), by=by)

    def tick(self) -> None:
        self.world.tick()

    def live(self) -> None:
        for workload in self.chance.sample(self.lives.alive(), min(5, len(self.lives.alive()))):
            self.lives.step(workload)

    def cancel(self) -> None:
        if alive := self.lives.alive():
            with self.world.session() as session:
                outbox.message(session, self.chance.choice(alive), MessageKind.CANCEL, 0, by="x")

    def lose(self) -> None:
        machine = self.chance.choice(sorted(self.fleet))
        self.world.machines.lost(self.world.attend(machine, f"boot-{self.boots[machine]}"))

    def come_back(self) -> None:
        with self.world.session() as session:
            lost = session.scalars(select(Machine.id).where(Machine.state == "lost").order_by(Machine.id)).all()
        for machine in lost:
            self.boots[machine] += self.chance.choice([0, 1])
            self.world.machine(machine, self.fleet[machine], incarnation=f"boot-{self.boots[machine]}")

    def confirm(self) -> None:
        """Confirms, as a machine's workflow does, that released tasks have stopped."""
        if self.lives.unconfirmed:
            machine, run = self.lives.unconfirmed.pop(0)
            self.world.machines.ready(self.world.attend(machine, f"boot-{self.boots[machine]}", [run]))

    def reboot(self) -> None:
        machine = self.chance.choice(sorted(self.fleet))
        self.boots[machine] += 1
        self.world.machine(machine, self.fleet[machine], incarnation=f"boot-{self.boots[machine]}")

    def cordon(self) -> None:
        self.world.alter(Machine, self.chance.choice(sorted(self.fleet)), cordon={"code": "x", "detail": {}})

    def uncordon(self) -> None:
        self.world.alter(Machine, self.chance.choice(sorted(self.fleet)), cordon=None, draining=False, failed_gangs=0)

    def drain(self) -> None:
        machine = self.chance.choice(sorted(self.fleet))
        self.world.alter(Machine, machine, draining=True)
        with self.world.session() as session:
            for row in session.scalars(
                select(Allocation).where(Allocation.machine == machine, Allocation.released_at.is_(None))
            ):
                outbox.message(session, row.workload, MessageKind.PREEMPT, row.attempt, machine=machine)

    def hold(self) -> None:
        queued = [w for w in self.lives.alive() if self.world.workload(w).region is None]
        if queued:
            self.world.alter(Workload, self.chance.choice(queued), held_by="x")

    def let_go(self) -> None:
        for workload in self.lives.alive():
            self.world.alter(Workload, workload, held_by=None)

    def lower(self) -> None:
        if alive := self.lives.alive():
            self.world.alter(Workload, self.chance.choice(alive), level=self.chance.randrange(5, 8))
