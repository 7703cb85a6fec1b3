"""Random operations in random order: the invariants hold after every step, and at the end all slots are free."""

from collections.abc import Callable

import pytest
from sqlalchemy import select

from domain.phases import TERMINAL_PHASES
from domain.protocol.workload_messages import MessageKind
from infra.db import outbox
from infra.db.models import Machine, Workload
from tests.activities.invariants import check, check_gangs, check_history, check_machines
from tests.activities.random_walk import FLEET, SMALL, Walk
from tests.activities.world import World
from tests.depth import few

STEPS = 120


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("seed", "fleet"),
    few([(2, FLEET), (1, SMALL), (2, SMALL), (1, FLEET)], 2),
    ids=lambda one: one if isinstance(one, int) else len(one),
)
def test_a_random_walk(new_world: Callable[..., World], seed: int, fleet: dict[str, int]) -> None:
    """Masks, promises, gangs, quota, events and messages are correct after the steps; at the end nothing is held."""
    world = new_world()
    walk = Walk(world, seed, fleet)
    for n in range(STEPS):
        walk.step()
        check_machines(world)
        check_gangs(world)
        if n % 5 == 0:  # violations of the other invariants remain visible later
            check(world)
    assert world.evictions(), "the walk must contain an eviction"
    for machine in fleet:
        world.machine(machine, fleet[machine], incarnation=f"boot-{walk.boots[machine]}")
        world.alter(Machine, machine, cordon=None, draining=False)
    walk.let_go()
    for workload in walk.lives.alive():
        with world.session() as session:
            outbox.message(session, workload, MessageKind.CANCEL, 0, by="x")
    for _ in range(100):
        walk.lives.fetch()
        for workload in walk.lives.alive():
            walk.lives.step(workload)
    assert walk.lives.alive() == []
    check(world)
    check_history(world)
    assert [world.masks(m) for m in fleet] == [(0, 0)] * len(fleet)
    with world.session() as session:
        assert {w.phase for w in session.scalars(select(Workload))} <= TERMINAL_PHASES
