"""Clusters with stores of their own: where checkpoints are saved, found after a move, and deleted."""

import base64

import pytest
from nacl.public import PrivateKey
from sqlalchemy import text
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.data.copies import CopyActivities
from activities.lifecycle import housekeeping
from activities.lifecycle.housekeeping import HousekeepingActivities
from domain.launch import LaunchDescription
from domain.phases import Phase
from domain.protocol.workloads import CheckpointCopy, LaunchPlan, StageRequest
from infra.db.models import Cluster, Machine, Workload
from mizzen.checkpoint import Checkpointer, StaleAttemptError
from mizzen.objects.urls import open_store
from tests.activities.staging import stage_launch
from tests.activities.world import World, job


@pytest.fixture
def campus(world: World) -> World:
    """A region whose buildings `a` and `b` have stores, and whose building `c` has none."""
    world.region("r")
    public_key = base64.b64encode(bytes(PrivateKey.generate().public_key)).decode()
    for cluster in "abc":
        world.machine(f"r/{cluster}/m", 2, public_key=public_key)
    for cluster in "ab":
        (world.folder / "stores" / cluster).mkdir(parents=True)
        world.alter(Cluster, ("r", cluster), store_url=_url(world, cluster))
    return world


def _url(world: World, cluster: str) -> str:
    return (world.folder / "stores" / cluster).as_uri()


def _start(world: World, workload: str, cluster: str) -> tuple[LaunchPlan, LaunchDescription]:
    """Lets a queued workload start in a cluster, as its workflow does; returns what was staged."""
    for other in "abc":
        world.alter(Machine, f"r/{other}/m", cordon=None if other == cluster else {"code": "x", "detail": {}})
    world.tick()
    attempt = world.workload(workload).attempt
    plan, launch = stage_launch(world, workload, attempt)
    if plan.checkpoint_region is not None and plan.checkpoint_store != plan.store_url:
        _copy(world, workload, plan)
    world.launch.staged_here(StageRequest(workload, attempt))
    return plan, launch


def _newest(launch: LaunchDescription) -> int | None:
    """Returns the step of the newest checkpoint that a task of this launch finds."""
    found = Checkpointer(launch.checkpoint.uri, attempt=launch.attempt).load_latest()
    return None if found is None else found.step


def _copy(world: World, workload: str, plan: LaunchPlan) -> int:
    request = CheckpointCopy(
        workload, world.workload(workload).attempt, plan.checkpoint_region or "", "r", plan.checkpoint_store,
        plan.store_url,
    )  # fmt: skip
    return int(ActivityEnvironment().run(CopyActivities(world.engine, world.settings).copy_checkpoint, request))


def test_a_workload_goes_on_in_other_buildings(campus: World) -> None:
    """It saves in the store of its building, and continues elsewhere from the newest step, also in a building that it
    comes back to; an attempt that it left can save nowhere.
    """
    workload = campus.submit(job())
    savers: list[Checkpointer] = []
    for number, cluster in enumerate("abcacb", 1):
        plan, launch = _start(campus, workload, cluster)
        assert plan.store_url == (None if cluster == "c" else _url(campus, cluster))
        place = campus.bucket("r").uri("") if cluster == "c" else f"{_url(campus, cluster)}/"
        assert launch.checkpoint.uri == f"{place}checkpoints/{workload}/"
        saver = Checkpointer(launch.checkpoint.uri, attempt=number)
        found = saver.load_latest()
        assert (found.state["step"] if found else 0) == 10 * (number - 1)
        saver.save(10 * number, {"step": 10 * number})
        savers.append(saver)
        campus.release(workload, Phase.PREEMPTED)
    for saver in savers[:-1]:
        with pytest.raises(StaleAttemptError):
            saver.save(999, {"step": 999})


def test_the_store_with_the_newest_checkpoint_is_not_mounted(campus: World) -> None:
    """The workload waits for it, and its reason says so; it does not continue from an older checkpoint elsewhere."""
    workload = campus.submit(job())
    for number, cluster in enumerate("ba", 1):
        _, launch = _start(campus, workload, cluster)
        Checkpointer(launch.checkpoint.uri, attempt=number).save(number, {"step": number})
        campus.release(workload, Phase.PREEMPTED)
    mounted, away = campus.folder / "stores" / "a", campus.folder / "away"
    mounted.rename(away)
    with pytest.raises(ApplicationError, match=f"the store {_url(campus, 'a')}: the marker .* is missing"):
        _start(campus, workload, "b")
    reason = campus.workload(workload).reason
    assert reason is not None and reason["code"] == "staging_failed" and _url(campus, "a") in reason["sentence"]
    plan, launch = stage_launch(campus, workload, 3)
    away.rename(mounted)
    assert _copy(campus, workload, plan) > 0
    assert _newest(launch) == 2


def test_a_workload_waits_for_the_store_of_its_own_building(campus: World) -> None:
    """Staging fails while the store that has its checkpoints is away; a store that it does not need may be away."""
    workload = campus.submit(job())
    for number, cluster in enumerate("ba", 1):
        _, launch = _start(campus, workload, cluster)
        Checkpointer(launch.checkpoint.uri, attempt=number).save(number, {"step": number})
        campus.release(workload, Phase.PREEMPTED)
    (campus.folder / "stores" / "b").rename(campus.folder / "b")
    (campus.folder / "stores" / "a").rename(campus.folder / "a")
    with pytest.raises(ApplicationError, match=r"the marker .* is missing"):
        _start(campus, workload, "a")
    (campus.folder / "a").rename(campus.folder / "stores" / "a")
    stage_launch(campus, workload, 3)
    assert campus.workload(workload).reason is None


def test_a_store_that_was_never_mounted_is_not_created(campus: World) -> None:
    """A worker without the mount writes no marker on its own disk: the workload would later restart from step 0."""
    (campus.folder / "stores" / "a").rmdir()
    workload = campus.submit(job())
    with pytest.raises(
        ApplicationError, match=f"the store {_url(campus, 'a')}: there is no folder .*: mount or create"
    ):
        _start(campus, workload, "a")
    assert not (campus.folder / "stores" / "a").exists()
    (campus.folder / "stores" / "a").mkdir()
    assert stage_launch(campus, workload)[0].store_url == _url(campus, "a")


def test_an_empty_folder_is_not_the_store_that_a_workload_comes_back_to(campus: World) -> None:
    """The mount point exists on the worker's host without the mount, when staging or copying to it."""
    workload = campus.submit(job())
    for number, cluster in enumerate("ab", 1):
        _, launch = _start(campus, workload, cluster)
        Checkpointer(launch.checkpoint.uri, attempt=number).save(number, {"step": number})
        campus.run(workload)
        campus.release(workload, Phase.PREEMPTED)
    mounted, away = campus.folder / "stores" / "a", campus.folder / "away"
    mounted.rename(away)
    mounted.mkdir()
    with pytest.raises(ApplicationError, match=r"the marker .* is missing"):
        _start(campus, workload, "a")
    mounted.rmdir()
    away.rename(mounted)
    plan, launch = stage_launch(campus, workload, 3)
    mounted.rename(away)
    mounted.mkdir()
    with pytest.raises(ApplicationError, match=r"the marker .* is missing"):
        _copy(campus, workload, plan)
    assert list(mounted.iterdir()) == []
    mounted.rmdir()
    away.rename(mounted)
    assert _copy(campus, workload, plan) > 0
    assert _newest(launch) == 2


def test_an_operator_changes_the_store(campus: World) -> None:
    """The checkpoints in the former store are found, and a running attempt keeps its store."""
    workload = campus.submit(job())
    _, launch = _start(campus, workload, "a")
    Checkpointer(launch.checkpoint.uri, attempt=1).save(7, {"step": 7})
    campus.run(workload)
    (campus.folder / "stores" / "new").mkdir()
    campus.alter(Cluster, ("r", "a"), store_url=_url(campus, "new"))
    assert stage_launch(campus, workload, 1)[0].store_url == _url(campus, "a")
    campus.release(workload, Phase.PREEMPTED)
    plan, launch = _start(campus, workload, "a")
    assert (plan.store_url, plan.checkpoint_store) == (_url(campus, "new"), _url(campus, "a"))
    assert _newest(launch) == 7


def test_a_gang_in_several_buildings_uses_the_bucket(campus: World) -> None:
    """Tasks of one gang need one place for their checkpoints."""
    workload = campus.running(job("x", tasks=2, gpus=2, span_clusters=True))
    plan, launch = stage_launch(campus, workload)
    assert len({node.machine for node in plan.nodes}) == 2
    assert plan.store_url is None and launch.checkpoint.uri.startswith(campus.bucket("r").uri(""))


def test_the_checkpoints_in_all_stores_are_deleted(campus: World) -> None:
    """Also those in stores that no cluster has any more."""
    workload = campus.submit(job())
    for cluster in "abc":
        _start(campus, workload, cluster)
        campus.run(workload)
        campus.release(workload, Phase.PREEMPTED)
    _start(campus, workload, "a")
    campus.release(workload, Phase.SUCCEEDED)
    campus.alter(Cluster, ("r", "a"), store_url=None)
    campus.alter(Workload, workload, finished_at=text("now() - interval '15 days'"))
    stores = campus.folder / "stores"
    assert {path.parts[-4] for path in stores.glob(f"*/checkpoints/{workload}/marker")} == {"a", "b"}
    house = HousekeepingActivities(campus.engine, campus.settings)
    (stores / "a").rename(campus.folder / "away")
    ActivityEnvironment().run(house.expire)
    assert campus.workload(workload).expired_at is None, "the folder of one of them is not mounted"
    (campus.folder / "away").rename(stores / "a")
    ActivityEnvironment().run(house.expire)
    assert campus.workload(workload).expired_at is not None
    assert [list(open_store(_url(campus, cluster)).list("")) for cluster in "ab"] == [[], []]


def test_stores_that_were_lost(campus: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workloads whose objects cannot be deleted do not keep others from expiring, however many there are. They expire
    themselves when an operator names the store.
    """
    monkeypatch.setattr(housekeeping, "_EXPIRED_AT_ONCE", 2)
    workloads = []
    for cluster in "aaaab":
        workloads.append(workload := campus.submit(job()))
        _start(campus, workload, cluster)
        campus.run(workload)
        campus.release(workload, Phase.SUCCEEDED)
        campus.alter(Workload, workload, finished_at=text("now() - interval '15 days'"))
    (campus.folder / "stores" / "a").rename(campus.folder / "away")
    house = HousekeepingActivities(campus.engine, campus.settings)
    for _ in range(4):
        ActivityEnvironment().run(house.expire)
    assert [campus.workload(one).expired_at is None for one in workloads] == [True] * 4 + [False]
    dropped = campus.settings.lifecycle.model_copy(update={"dropped_stores": (_url(campus, "a"),)})
    house = HousekeepingActivities(campus.engine, campus.settings.model_copy(update={"lifecycle": dropped}))
    for _ in range(3):
        ActivityEnvironment().run(house.expire)
    assert all(campus.workload(one).expired_at for one in workloads)


def test_a_store_that_was_never_reached(campus: World) -> None:
    """A workload that was cancelled before its cluster's store could be opened expires, although it has no marker."""
    workload = campus.submit(job())
    (campus.folder / "stores" / "a").rmdir()
    with pytest.raises(ApplicationError, match=_url(campus, "a")):
        _start(campus, workload, "a")
    campus.release(workload, Phase.CANCELLED)
    campus.alter(Workload, workload, finished_at=text("now() - interval '15 days'"))
    ActivityEnvironment().run(HousekeepingActivities(campus.engine, campus.settings).expire)
    assert campus.workload(workload).expired_at is not None
