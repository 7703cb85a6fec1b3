"""Launched machines join once with their token; machines that no provider launched need none."""

from typing import Any

import pytest
from sqlalchemy import select

from activities.capacity.join_admission import join_token
from activities.capacity.ledger import request_end
from activities.capacity.pools import request_instance
from capacity.offers import Offer, Shape
from capacity.pools import Pool
from domain.capacity import CapacityKind
from domain.reasons import Reason, ReasonCode
from infra.db.capacity import InstanceRow
from infra.db.logs import Outbox
from infra.db.models import Cluster, Machine
from infra.keys import load_master_key
from tests.activities.world import World, key

OFFER = Offer("sim", "west", "za", CapacityKind.SPOT, Shape("small", 4, "a100", 16_000, 64 << 30), 4.0, 30.0)


class Launched:
    """A requested instance, and the agent of its machine."""

    def __init__(self, world: World) -> None:
        self.world = world
        load_master_key(world.settings.master_key_path, create=True)
        world.region("west")
        with world.session() as session:
            self.id = request_instance(session, Pool("west", "burst", 1), OFFER)
        self.machine = f"west/burst-sim-za-spot/{self.id}"
        self.token = join_token(world.settings.master_key_path, self.id)

    def says_hello(self, machine: str | None = None, **more: Any) -> bool:
        """Registers the agent; returns whether it was admitted."""
        fields = {"instance": self.id, "join_token": self.token, **more}
        welcome = self.world.machines.register(self.world.hello(machine or self.machine, **fields))
        with self.world.session() as session:
            known = session.get(Machine, machine or self.machine) is not None
        assert known or welcome.refused
        assert welcome.unknown == (not known)
        return not welcome.refused

    def row(self) -> InstanceRow:
        """Returns the instance's row in the ledger."""
        with self.world.session() as session:
            row = session.get_one(InstanceRow, self.id)
            session.expunge(row)
            return row


@pytest.fixture
def launched(world: World) -> Launched:
    """A requested instance."""
    return Launched(world)


def test_it_is_let_in_by_its_token(launched: Launched) -> None:
    """An agent with its token is admitted; its cluster gets the offer's data, and its workflow gets a message."""
    assert launched.says_hello(public_key=key("k"))
    assert launched.row().machine == launched.machine
    launched.world.delivered()
    launched.world.machines.ready(launched.world.attend(launched.machine, "boot-1", []))
    with launched.world.session() as session:
        mail = session.scalars(
            select(Outbox.body).where(Outbox.kind == "instance", Outbox.delivered_at.is_(None))
        ).all()
        cluster = session.get_one(Cluster, ("west", "burst-sim-za-spot"))
        assert list(mail) == [{"instance": launched.id}]
        assert (cluster.zone, cluster.capacity, cluster.prices) == ("za", "spot", {"a100": 1.0})
    # After a restart the agent is identified by its key.
    assert launched.says_hello(public_key=key("k"), join_token="")


@pytest.mark.parametrize(
    "lie",
    [
        {"join_token": ""},
        {"join_token": "0" * 64},
        {"join_token": "é"},
        {"instance": "", "join_token": ""},
        {"instance": "in-0000000000000000"},
        {"machine": "west/burst-sim-za-spot/other"},
    ],
    ids=[
        "no token",
        "another token",
        "not ASCII",
        "no instance and no token",
        "unknown instance",
        "another machine",
    ],
)
def test_it_is_refused_without(launched: Launched, lie: dict[str, Any]) -> None:
    """Without the right token nothing is registered, and the token stays valid."""
    assert not launched.says_hello(**lie)
    assert launched.row().machine is None
    assert launched.says_hello()


def test_a_token_is_of_one_machine(launched: Launched) -> None:
    """A token cannot be used again with another key, and differs between instances."""
    assert launched.says_hello(public_key=key("k"))
    assert not launched.says_hello(public_key=key("other"))
    other = join_token(launched.world.settings.master_key_path, "in-other")
    assert other != launched.token


def test_a_token_is_bound_to_the_first_machine_of_the_provider(launched: Launched) -> None:
    """Of two jobs of one instance, that of which the agent comes first has it; the other one's agent is refused."""
    assert launched.row().native_id is None
    assert launched.says_hello(public_key=key("k"), native_id="12")
    assert (launched.row().native_id, launched.row().started_at is not None) == ("12", True)
    with launched.world.session() as session:
        session.delete(session.get_one(Machine, launched.machine))
    assert not launched.says_hello(public_key=key("other"), native_id="11")
    assert launched.says_hello(public_key=key("k"), native_id="12")


def test_a_machine_does_not_claim_that_of_another_instance(launched: Launched) -> None:
    """An agent cannot name the job of another instance as its own: ending its instance would end that job."""
    with launched.world.session() as session:
        other = request_instance(session, Pool("west", "burst", 2), OFFER)
        session.get_one(InstanceRow, other).native_id = "7"
    assert not launched.says_hello(native_id="7")
    assert launched.says_hello(native_id="8")


def test_a_machine_that_is_not_known_any_more_shows_its_token_again(launched: Launched) -> None:
    """A machine whose row was deleted needs its token again."""
    assert launched.says_hello(public_key=key("k"))
    with launched.world.session() as session:
        session.delete(session.get_one(Machine, launched.machine))
    assert not launched.says_hello(public_key=key("other"), join_token="")
    assert launched.says_hello(public_key=key("k"))


def test_what_is_gone_does_not_join(launched: Launched) -> None:
    """The agent of an instance that is gone is refused."""
    with launched.world.session() as session:
        assert request_end(session, launched.id, Reason(ReasonCode.ENDED_BY_OPERATOR, {"by": "k"}))
        assert not request_end(session, launched.id, Reason(ReasonCode.ENDED_BY_OPERATOR, {"by": "l"}))
        row = session.get_one(InstanceRow, launched.id)
        row.phase, row.gone_at = "gone", row.requested_at
    assert not launched.says_hello()


def test_what_is_to_end_joins_without_taking_work(launched: Launched) -> None:
    """An instance that was told to end before its machine registered: the machine is cordoned from the start."""
    with launched.world.session() as session:
        assert request_end(session, launched.id, Reason(ReasonCode.ENDED_BY_OPERATOR, {"by": "k"}))
    assert launched.says_hello()
    with launched.world.session() as session:
        cordon = session.get_one(Machine, launched.machine).cordon
        assert cordon is not None and cordon["code"] == "ended_by_operator"


def test_a_machine_that_nobody_launched_needs_no_token(world: World) -> None:
    """A machine that no provider launched joins without a token."""
    world.region("r")
    world.machine("r/c/m", 4)
    with world.session() as session:
        assert session.get_one(Machine, "r/c/m").state == "ready"
