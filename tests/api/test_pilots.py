"""Keys of pilots: machines that a tenant brings itself, in a cluster that only this tenant may use."""

from datetime import timedelta

from sqlalchemy import func, select

from infra.db import own_machines
from infra.db.models import Cluster, Machine
from infra.db.tenants import ApiKey, Tenant
from tests.api.calls import act, get
from tests.api.world import ApiWorld

PATH = "/v1/pilots/north/pilot-1"
BODY = {"expires_in_s": 3600}


def _joins(world: ApiWorld, machine: str, state: str = "ready") -> None:
    """Writes the row of a machine whose agent has joined, as a copy of another one."""
    with world.session() as session:
        like = session.get_one(Machine, "north/alpha/m2")
        body = {column.key: getattr(like, column.key) for column in Machine.__table__.columns}
        region, cluster, _ = machine.split("/")
        body |= {"id": machine, "region": region, "cluster": cluster, "state": state}
        body["lost_at"] = func.now() - timedelta(hours=1) if state == "lost" else None
        session.add(Machine(**body))


async def test_a_pilot_gets_a_key_of_its_own_machine(world: ApiWorld) -> None:
    """The cluster belongs to the tenant; a repeated request replaces the key; other tenants have their own cluster."""
    first = (await act(world, PATH, "vision", BODY, "PUT")).json()
    second = (await act(world, PATH, "vision", BODY, "PUT")).json()
    foreign = (await act(world, PATH, "speech", BODY, "PUT")).json()
    with world.session() as session:
        number = session.get_one(Tenant, "vision").number
        keys = session.scalars(select(ApiKey).where(ApiKey.machine == first["machine"])).all()
        assert session.get_one(Cluster, ("north", f"own-{number}")).tenant == "vision"
        assert [(key.role, key.tenant) for key in keys] == [("machine", None)]
    assert first["machine"] == second["machine"] == f"north/own-{number}/pilot-1"
    assert first["key"] != second["key"]
    assert foreign["machine"] != first["machine"]
    assert [one["machine"] for one in (await get(world, "/v1/pilots", "vision"))["items"]] == [first["machine"]]
    assert (await act(world, "/v1/pilots/nowhere/pilot-1", "vision", BODY, "PUT")).status_code == 404
    assert (await act(world, f"{PATH}?tenant=speech", "vision", BODY, "PUT")).status_code == 404


async def test_a_cluster_of_others_is_not_taken(world: ApiWorld) -> None:
    """If a cluster with the name exists and is shared, no pilot joins it."""
    with world.session() as session:
        number = session.get_one(Tenant, "vision").number
        session.add(Cluster(region="north", name=f"own-{number}"))
    answer = await act(world, PATH, "vision", BODY, "PUT")
    assert (answer.status_code, f"own-{number}" in answer.json()["detail"]) == (409, True)


async def test_a_stopped_pilot_may_save(world: ApiWorld) -> None:
    """The key of a machine that has joined still works for ten minutes; that of another one is deleted."""
    machine = (await act(world, PATH, "vision", BODY, "PUT")).json()["machine"]
    _joins(world, machine)
    assert (await act(world, PATH, "vision", method="DELETE")).status_code == 204
    with world.session() as session:
        left = select(ApiKey.expires_at - func.now()).where(ApiKey.machine == machine)
        assert session.scalars(left).one() < timedelta(seconds=601)
        session.get_one(Machine, machine).state = "lost"
    assert (await act(world, PATH, "vision", method="DELETE")).status_code == 204
    assert (await act(world, PATH, "vision", method="DELETE")).status_code == 404


async def test_what_is_left_of_pilots_goes(world: ApiWorld) -> None:
    """Lost machines and old keys are found; a tenant with such machines cannot be deleted, and takes its cluster."""
    machine = (await act(world, PATH, "speech", BODY, "PUT")).json()["machine"]
    _joins(world, machine, "lost")
    with world.session() as session:
        assert session.scalars(own_machines.gone_machines(60)).all() == [machine]
        assert session.scalars(own_machines.gone_machines(7200)).all() == []
        session.execute(ApiKey.__table__.delete().where(ApiKey.tenant == "speech"))
    answer = await act(world, "/v1/tenants/speech", method="DELETE")
    assert (answer.status_code, machine in answer.json()["detail"]) == (409, True)
    with world.session() as session:
        session.delete(session.get_one(Machine, machine))
        own_machines.forget_expired_keys(session)
        key = session.scalars(select(ApiKey).where(ApiKey.machine == machine)).one()
        key.expires_at = func.now() - timedelta(days=2)
        session.flush()
        own_machines.forget_expired_keys(session)
        assert session.scalars(select(ApiKey).where(ApiKey.machine == machine)).all() == []
    assert (await act(world, "/v1/tenants/speech", method="DELETE")).status_code == 204
    with world.session() as session:
        assert session.scalars(select(Cluster.name).where(Cluster.tenant.is_not(None))).all() == []
