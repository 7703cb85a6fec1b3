"""Workloads with an image: where they are placed, and that every attempt runs the image of the first one."""

import base64
from collections.abc import Iterator

import pytest
from nacl.public import PrivateKey
from temporalio.exceptions import ApplicationError

from activities.lifecycle.image_digests import pinned
from activities.lifecycle.launch import LaunchActivities
from agent.sealed import unseal
from domain.images import PULL_LOGIN
from domain.spec import WorkloadSpec
from infra.db.tenants import Secret
from infra.keys import encrypt_secret, load_master_key
from tests.activities.staging import stage_launch
from tests.activities.world import World, job
from tests.containers import push_manifest, registry

PLAIN, ENGINE = "r/c/a-plain", "r/c/b-engine"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A registry on loopback."""
    with registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
def fleet(world: World) -> World:
    """A region with a machine without an engine, which schedulers prefer by its name."""
    world.region("r")
    world.machine(PLAIN, 4)
    return world


def test_only_machines_with_an_engine_are_used(fleet: World) -> None:
    """The reason names the others; a machine that gets an engine wakes the scheduler."""
    workload, other = fleet.submit(job(image="lab/train:1")), fleet.submit(job())
    assert fleet.tick().awarded == 1
    assert fleet.waiting(workload) == ["insufficient_capacity r", "no_container_engine r"]
    assert fleet.reasons(workload)[-1]["detail"]["machines"] == [PLAIN]
    wakes = fleet.put_out("wake")
    fleet.machines.register(fleet.hello(PLAIN, 4, engine="docker 28"))
    assert fleet.put_out("wake") == wakes + 1
    assert fleet.tick().awarded == 1
    assert fleet.holdings(workload).keys() == fleet.holdings(other).keys() == {PLAIN}


def _spec(image: str) -> WorkloadSpec:
    return WorkloadSpec(name="w", tenant="t", jobs=(job(image=image),))


def test_the_digest_of_the_first_attempt_counts(world: World, host: str) -> None:
    """A tag that names another image later does not change what the workload runs."""
    first = push_manifest(host, "lab/train", "1", "first")
    tasks = world.settings.tasks.model_copy(update={"registries": (f"http://{host}",)})
    world.launch = LaunchActivities(world.engine, world.settings.model_copy(update={"tasks": tasks}))
    world.region("r")
    world.machine(ENGINE, 4, engine="docker 28")
    workload = world.running(job(image=f"{host}/lab/train:1"))
    _, launch = stage_launch(world, workload)
    assert launch.jobs["main"].image == f"{host}/lab/train@{first}"
    second = push_manifest(host, "lab/train", "1", "second")
    assert second != first
    _, launch = stage_launch(world, workload)
    assert launch.jobs["main"].image == f"{host}/lab/train@{first}"
    _, launch = stage_launch(world, world.running(job(image=f"{host}/lab/train:1")))
    assert launch.jobs["main"].image == f"{host}/lab/train@{second}"


def test_registries_that_may_not_be_asked(host: str) -> None:
    """A document cannot make the control plane send requests to its own network, unless the operator lists the host."""
    for image in (f"{host}/a", "localhost/a", "169.254.169.254/a", "10.0.0.1:5432/a", "[::1]:80/a"):
        with pytest.raises(ApplicationError, match="not at a public address") as caught:
            pinned(_spec(image), {}, {}, ())
        assert caught.value.type == "ImageUnavailable" and not caught.value.non_retryable
        with pytest.raises(ApplicationError, match="not at a public address"):
            pinned(_spec(f"{image}@sha256:{'0' * 64}"), {}, {}, ())


def test_an_image_that_the_registry_does_not_have(host: str) -> None:
    """Agents get the tag, fail to fetch it, and blame the workload. A registry that does not answer is asked again."""
    assert pinned(_spec(f"{host}/none:1"), {}, {}, (f"http://{host}",)) == {}
    with pytest.raises(ApplicationError, match=r"image 127\.0\.0\.1:9/a:1") as caught:
        pinned(_spec("127.0.0.1:9/a:1"), {}, {}, ("http://127.0.0.1:9",))
    assert caught.value.type == "ImageUnavailable"


def test_the_login_is_sealed_for_the_machine(world: World) -> None:
    """It is no variable of the task: the agent alone uses it."""
    key = PrivateKey.generate()
    world.region("r")
    world.machine(ENGINE, 4, engine="docker 28", public_key=base64.b64encode(bytes(key.public_key)).decode())
    load_master_key(world.settings.master_key_path, create=True)
    with world.session() as session:
        box = encrypt_secret(load_master_key(world.settings.master_key_path), "robot:word")
        session.add(Secret(tenant="t", name="hub", box=box))
    image = f"ghcr.io/lab/train@sha256:{'1' * 64}"
    spec = job(image=image, image_pull_secret="hub")
    _, launch = stage_launch(world, world.running(spec))
    assert unseal([bytes(key)], launch.sealed_secrets[ENGINE]) == {"main": {PULL_LOGIN: "robot:word"}}
