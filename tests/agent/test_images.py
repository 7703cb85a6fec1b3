"""Images of tasks on a machine: how far a fetch is, registries that fail, and the removal of what nobody needs."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agent.cgroups import make_cgroup, remove_cgroup
from agent.containers.image_cleanup import FetchedImages
from agent.containers.leftovers import remove_images
from agent.state import StateFolder
from domain.images import PULL_LOGIN
from domain.protocol.activities import Activity
from domain.protocol.machines import NodeOutcome, NodePrepared, PrepareNode
from tests.agent.harness import Lab, description, digest, sealed_for, until_async
from tests.agent.test_containers import image_config, image_launch
from tests.containers import DockerHere, dockerd, push_large, registry

_SIZE_BYTES = 24 << 20
_USERS = "robot:$2b$05$.HT8oGUNJ8YYC3s6EbLUhOdm2M5FqOcaObZjr6zzz0fGzK7U4h05i\n"
"""Its password is "word"."""


class RegistryLink:
    """A connection to a registry that can be slow or cut."""

    def __init__(self, host: str) -> None:
        self._registry = host.rpartition(":")[2]
        self.bytes_s: float | None = None
        """None: as fast as possible."""
        self.left_bytes: int | None = None
        """What answers may still carry before the link is cut; None: any number."""
        self.host = ""

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator["RegistryLink"]:
        """Listens on a free port of loopback."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            there, back = await asyncio.open_connection("127.0.0.1", int(self._registry))
            try:
                await asyncio.wait(
                    [asyncio.create_task(self._copy(reader, back)), asyncio.create_task(self._answer(there, writer))],
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                back.close()
                writer.close()

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while piece := await source.read(65536):
            target.write(piece)
            await target.drain()

    async def _answer(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while piece := await source.read(65536):
            if self.left_bytes is not None:
                self.left_bytes -= len(piece)
                if self.left_bytes < 0:
                    return
            target.write(piece)
            await target.drain()
            if self.bytes_s is not None:
                await asyncio.sleep(len(piece) / self.bytes_s)


@pytest.fixture(scope="module")
def docker() -> Iterator[DockerHere]:
    """A dockerd without images, which does not repeat downloads by itself: that takes a minute."""
    cgroup = make_cgroup(f"engine-{os.getpid()}")
    with dockerd("--max-download-attempts", "1", cgroup=cgroup) as here:
        yield here
    if cgroup is not None:
        remove_cgroup(cgroup)


@pytest.fixture(scope="module")
def registry_host(docker: DockerHere, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A registry with `big:1`, whose one layer cannot be compressed, `other:1`, and `changed:1`, which is damaged."""
    folder = tmp_path_factory.mktemp("images")
    with registry(folder / "registry") as host:
        for name in ("big", "other", "changed"):
            (folder / "noise").write_bytes(os.urandom(_SIZE_BYTES))
            docker.load(f"{host}/{name}:1", extra=folder / "noise")
            docker.docker("push", f"{host}/{name}:1")
            docker.engine.remove_image(f"{host}/{name}:1")
        newest = max((folder / "registry").rglob("blobs/sha256/*/*/data"), key=_age_of_layer)
        with newest.open("r+b") as layer:
            layer.seek(_SIZE_BYTES // 2)
            layer.write(b"another content")
        yield host


def _age_of_layer(blob: Path) -> float:
    found = blob.stat()
    return found.st_mtime if found.st_size > _SIZE_BYTES else 0.0


@pytest.mark.long
async def test_a_slow_fetch_says_how_far_it_is(lab: Lab, docker: DockerHere, registry_host: str) -> None:
    """The heartbeats name the image and the megabytes; a machine that has the image does not fetch it again."""
    config = image_config(lab, docker, heartbeat_interval_s=0.2)
    async with RegistryLink(registry_host).open() as link, lab.agent(config):
        link.bytes_s = _SIZE_BYTES / 4
        launch = image_launch(lab, config, "true", image=f"{link.host}/big:1")
        running = await lab.run(launch, config.machine)
        texts = set[str]()
        while not any(text.endswith(" of 26 MB") for text in texts):
            said = await running.heartbeat()
            texts.add((said or {}).get("preparing") or "")
            await asyncio.sleep(0.1)
        assert all(text.startswith(f"fetching image {link.host}/big:1") for text in texts if text)
        outcome: NodeOutcome = await running.result(NodeOutcome)
        assert outcome.exits[0].exit_code == 0
        link.left_bytes = 0
        again = image_launch(lab, config, "true", image=f"{link.host}/big:1")
        outcome = await (await lab.run(again, config.machine)).result(NodeOutcome)
        assert outcome.exits[0].exit_code == 0
    docker.engine.remove_image(f"{link.host}/big:1")


@pytest.mark.long
async def test_fetches_have_a_share_of_the_bandwidth(lab: Lab, docker: DockerHere, registry_host: str) -> None:
    """The engine gets no more than the setting; without a cgroup of its own, there is a warning and no limit."""
    if docker.cgroup is None:
        pytest.skip("this machine has no cgroup v2")
    config = image_config(lab, docker, image_bytes_s=_SIZE_BYTES / 3)
    async with lab.agent(config):
        launch = image_launch(lab, config, "true", image=(image := f"{registry_host}/big:1"))
        began_s = time.monotonic()
        await lab.prepare(launch, config.machine, only_images=True, attempts=1)
        assert time.monotonic() - began_s > 2.5, "a lower bound, which holds on a busy machine, too"
    docker.engine.remove_image(image)


@pytest.mark.long
@pytest.mark.timeout(1200)  # It moves 2 GB four times.
async def test_gangs_stop_while_a_large_image_is_fetched(lab: Lab, docker: DockerHere, registry_host: str) -> None:
    """While an image of 2 GB is fetched in advance, the gangs that give up their slots save and stop."""
    config = image_config(lab, docker, heartbeat_interval_s=0.2)
    image = push_large(registry_host, "large", 2 << 30)
    async with RegistryLink(registry_host).open() as link, lab.agent(config):
        link.bytes_s = 4 << 20
        slow = image.replace(registry_host, link.host)
        launch = image_launch(lab, config, "true", image=slow)
        request = PrepareNode(
            launch.workload_id, launch.attempt, config.machine, lab.write(launch), lab.bucket_url, [], digest(launch),
            only_images=True,
        )  # fmt: skip
        saves = "trap 'dd if=/dev/zero of=saved bs=1M count=64; exit 0' TERM; touch ready; sleep 600 & wait"
        gangs = [description(lab.region, config, saves) for _ in range(3)]
        for gang in gangs:
            lab.write(gang)
        running = [await lab.run(gang, config.machine) for gang in gangs]
        works = [lab.folder_of(gang, config).work for gang in gangs]
        await until_async(lambda: all((work / "ready").exists() for work in works), 120.0)
        fetching = await lab.start(Activity.PREPARE_NODE, config.machine, request, 1)
        while " of 2147 MB" not in ((await fetching.heartbeat() or {}).get("preparing") or ""):
            await asyncio.sleep(0.1)
        stops = await asyncio.gather(*(lab.stop(gang, config.machine, 60.0) for gang in gangs))
        assert await fetching.state() is not None, "the fetch has ended before the stops"
        assert all([(end.exit_code, end.signal) for end in stop.exits] == [(0, None)] for stop in stops)
        assert all((work / "saved").stat().st_size == 64 << 20 for work in works)
        for one in running:
            await one.result(NodeOutcome)
        link.bytes_s = None
        await fetching.result(NodePrepared)
    assert docker.engine.image(slow) is not None
    docker.engine.remove_image(slow)


@pytest.mark.rotating
async def test_a_machine_may_fetch_the_image_before_it_has_the_slots(
    lab: Lab, docker: DockerHere, registry_host: str
) -> None:
    """Nothing of the attempt is kept but the image."""
    config = image_config(lab, docker)
    async with lab.agent(config):
        image = f"{registry_host}/big:1"
        launch = image_launch(lab, config, "true", image=image)
        await lab.prepare(launch, config.machine, only_images=True)
        assert docker.engine.image(image) is not None
        assert StateFolder(config.state_dir).attempts() == []
    docker.engine.remove_image(image)


async def test_a_fetch_in_advance_may_overlap_with_the_preparation(
    lab: Lab, docker: DockerHere, registry_host: str
) -> None:
    """Both requests for the same attempt succeed, whichever ends first."""
    config = image_config(lab, docker)
    async with RegistryLink(registry_host).open() as link, lab.agent(config):
        link.bytes_s = _SIZE_BYTES / 2
        image = f"{link.host}/big:1"
        launch = image_launch(lab, config, "true", image=image)
        advance = asyncio.create_task(lab.prepare(launch, config.machine, only_images=True, attempts=1))
        await asyncio.sleep(0.5)
        await asyncio.gather(advance, lab.prepare(launch, config.machine, attempts=1))
    docker.engine.remove_image(image)


@pytest.mark.rotating
async def test_a_registry_that_dies_midway_is_asked_again(lab: Lab, docker: DockerHere, registry_host: str) -> None:
    """A fetch that is cut is a failure that a retry can cure; the retry runs when the registry is back."""
    config = image_config(lab, docker)
    async with RegistryLink(registry_host).open() as link, lab.agent(config):
        link.left_bytes = _SIZE_BYTES // 2
        image = f"{link.host}/big:1"
        launch = image_launch(lab, config, "true", image=image)
        failure = await (await lab.run(launch, config.machine, attempts=1)).failure()
        assert failure.type == "ImageUnavailable" and image in str(failure)
        link.left_bytes = None
        outcome: NodeOutcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
        assert outcome.exits[0].exit_code == 0
    docker.engine.remove_image(image)


async def test_a_registry_that_wants_a_password_gets_the_secret(lab: Lab, docker: DockerHere, tmp_path: Path) -> None:
    """Without it, or with another one, the failure says what the registry answered. The task does not see it."""
    with registry(tmp_path) as host:
        docker.load(f"{host}/closed:1")
        docker.docker("push", f"{host}/closed:1")
        docker.engine.remove_image(f"{host}/closed:1")
    config = image_config(lab, docker)
    with registry(tmp_path, _USERS) as host:
        async with lab.agent(config):
            for login in (None, "robot:wrong"):
                secrets = {} if login is None else {"main": {PULL_LOGIN: login}}
                sealed = {"sealed_secrets": {config.machine: sealed_for(config, secrets)}}
                launch = image_launch(lab, config, "true", image=f"{host}/closed:1", **sealed)
                failure = await (await lab.run(launch, config.machine, attempts=1)).failure()
                assert failure.type == "ImageUnavailable"
                assert any(word in str(failure) for word in ("no basic auth", "unauthorized")), failure
            sealed = {"sealed_secrets": {config.machine: sealed_for(config, {"main": {PULL_LOGIN: "robot:word"}})}}
            launch = image_launch(lab, config, "env", image=f"{host}/closed:1", **sealed)
            outcome: NodeOutcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
    said = lab.folder_of(launch, config).output.read_text()
    assert outcome.exits[0].succeeded and "RANK=0" in said and "word" not in said
    docker.engine.remove_image(f"{host}/closed:1")


async def test_content_that_is_not_that_of_the_digest_is_not_run(
    lab: Lab, docker: DockerHere, registry_host: str
) -> None:
    """A digest that the registry does not have ends the work; one whose content is another is never run."""
    config = image_config(lab, docker)
    async with lab.agent(config):
        image = f"{registry_host}/big@sha256:{'0' * 64}"
        launch = image_launch(lab, config, "true", image=image)
        failure = await (await lab.run(launch, config.machine, attempts=1)).failure()
        assert failure.type == "BadImage" and image in str(failure)
        launch = image_launch(lab, config, "true", image=f"{registry_host}/changed:1")
        failure = await (await lab.run(launch, config.machine, attempts=1)).failure()
        assert failure.type == "ImageUnavailable" and "verification failed" in str(failure)


@pytest.mark.rotating
async def test_images_are_removed_by_age_and_size(lab: Lab, docker: DockerHere, registry_host: str) -> None:
    """Only images that the agent has fetched, and that no attempt on the machine needs."""
    docker.load("mine:1")
    config = image_config(lab, docker)
    big, other = (f"{registry_host}/{name}:1" for name in ("big", "other"))
    async with lab.agent(config):
        for image in (big, other):
            launch = image_launch(lab, config, "true", image=image)
            await (await lab.run(launch, config.machine)).result(NodeOutcome)
        state = StateFolder(config.state_dir)
        records = {one.name: one for one in FetchedImages(state.images).all()}
        assert set(records) == {big, other} and records[big].size_bytes > _SIZE_BYTES
        os.utime(records[big].record, (1.0, 1.0))
        held = image_launch(lab, config, "while true; do sleep 0.1; done", image=big)
        running = await lab.run(held, config.machine)
        await until_async(lambda: lab.folder_of(held, config).started_at_s() is not None)
        assert remove_images(config, state) == []
        await lab.stop(held, config.machine, 0.0)
        await running.result(NodeOutcome)
        small = config.model_copy(update={"images_bytes": records[big].size_bytes})
        assert remove_images(small, state) == [other]  # The held attempt has used the other one since.
        assert remove_images(small, state) == []
        assert remove_images(config.model_copy(update={"keep_images_s": 0.0}), state) == [big]
    assert not list(FetchedImages(state.images).all())
    assert [docker.engine.image(name) for name in (big, other)] == [None, None]
    assert docker.engine.image("mine:1") is not None
