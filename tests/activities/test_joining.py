"""Machines that were launched join with their token, once; the ledger has a say in nothing else."""

from typing import Any

import pytest
from sqlalchemy import select

from activities.capacity.pools import request_instance, tell_to_end
from activities.capacity.tokens import join_token
from capacity.offers import Offer, Shape
from capacity.pools import Pool
from domain.capacity import CapacityKind
from domain.reasons import Reason, ReasonCode
from infra.db.capacity import InstanceRow
from infra.db.logs import Outbox
from infra.db.models import Cluster, Machine
from infra.keys import load_master_key
from tests.activities.world import World

OFFER = Offer("sim", "west", "za", CapacityKind.SPOT, Shape("small", 4, "a100", 16_000, 64 << 30), 4.0, 30.0)


class Launched:
    """An instance that was requested, and its machine's agent."""

    def __init__(self, world: World) -> None:
        self.world = world
        load_master_key(world.settings.master_key_path, create=True)
        world.region("west")
        with world.session() as session:
            self.id = request_instance(session, Pool("west", "burst", 1), OFFER)
        self.machine = f"west/burst-za-spot/{self.id}"
        self.token = join_token(world.settings.master_key_path, self.id)

    def says_hello(self, machine: str | None = None, **more: Any) -> bool:
        """Whether its agent was let in."""
        fields = {"instance": self.id, "join_token": self.token, **more}
        welcome = self.world.machines.register(self.world.hello(machine or self.machine, **fields))
        with self.world.session() as session:
            known = session.get(Machine, machine or self.machine) is not None
        assert known or welcome.refused
        return not welcome.refused

    def row(self) -> InstanceRow:
        """What the ledger says."""
        with self.world.session() as session:
            row = session.get_one(InstanceRow, self.id)
            session.expunge(row)
            return row


@pytest.fixture
def launched(world: World) -> Launched:
    """One that was requested."""
    return Launched(world)


def test_it_is_let_in_by_its_token(launched: Launched) -> None:
    """Its cluster has what the offer says; its workflow hears when it is ready, and the ledger knows its machine."""
    assert launched.says_hello(public_key="k")
    assert launched.row().machine == launched.machine
    launched.world.delivered()
    launched.world.machines.ready(launched.world.attend(launched.machine, "boot-1", []))
    with launched.world.session() as session:
        mail = session.scalars(
            select(Outbox.body).where(Outbox.kind == "instance", Outbox.delivered_at.is_(None))
        ).all()
        cluster = session.get_one(Cluster, ("west", "burst-za-spot"))
        assert list(mail) == [{"instance": launched.id}]
        assert (cluster.zone, cluster.capacity, cluster.prices) == ("za", "spot", {"a100": 1.0})
    # Its agent restarts: from now on its key says who it is.
    assert launched.says_hello(public_key="k", join_token="")


@pytest.mark.parametrize(
    "lie",
    [
        {"join_token": ""},
        {"join_token": "0" * 64},
        {"join_token": "é"},
        {"instance": "", "join_token": ""},
        {"instance": "in-0000000000000000"},
        {"machine": "west/burst-za-spot/other"},
    ],
    ids=[
        "no token",
        "another token",
        "no ASCII",
        "as a machine that nobody launched",
        "of no instance",
        "another machine",
    ],
)
def test_it_is_refused_without(launched: Launched, lie: dict[str, Any]) -> None:
    """Nothing is registered, and the token is still good."""
    assert not launched.says_hello(**lie)
    assert launched.row().machine is None
    assert launched.says_hello()


def test_a_token_is_of_one_machine(launched: Launched) -> None:
    """Shown again with another key it lets nobody in; nor does another instance's."""
    assert launched.says_hello(public_key="k")
    assert not launched.says_hello(public_key="other")
    other = join_token(launched.world.settings.master_key_path, "in-other")
    assert other != launched.token


def test_a_machine_that_is_not_known_any_more_shows_its_token_again(launched: Launched) -> None:
    """Without its row no key says who it is."""
    assert launched.says_hello(public_key="k")
    with launched.world.session() as session:
        session.delete(session.get_one(Machine, launched.machine))
    assert not launched.says_hello(public_key="other", join_token="")
    assert launched.says_hello(public_key="k")


def test_what_is_gone_does_not_join(launched: Launched) -> None:
    """An agent that comes too late is refused, and nothing is made of it."""
    with launched.world.session() as session:
        assert tell_to_end(session, launched.id, Reason(ReasonCode.ENDED_BY_OPERATOR, {"by": "k"}))
        assert not tell_to_end(session, launched.id, Reason(ReasonCode.ENDED_BY_OPERATOR, {"by": "l"}))
        row = session.get_one(InstanceRow, launched.id)
        row.phase, row.gone_at = "gone", row.requested_at
    assert not launched.says_hello()


def test_a_machine_that_nobody_launched_needs_no_token(world: World) -> None:
    """As ever."""
    world.region("r")
    world.machine("r/c/m", 4)
    with world.session() as session:
        assert session.get_one(Machine, "r/c/m").state == "ready"
