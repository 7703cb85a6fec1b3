"""Tasks with an image: containers of a real engine, with a shim each."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import pytest

from agent.config import AgentConfig
from agent.containers.engine import Container
from agent.device_rules import HeldGpus
from domain.launch import LaunchDescription
from domain.protocol.machines import NodeOutcome
from tests.agent.fake_gpus import FakeGpus
from tests.agent.harness import Lab, description, uid_of, until_async, with_mounts
from tests.containers import DockerHere, dockerd, podman_here

IMAGE = "shell:1"


@pytest.fixture(scope="module")
def docker() -> Iterator[DockerHere]:
    """A dockerd with an image that has busybox's shell, and no Python."""
    with dockerd() as here:
        here.load(IMAGE, {"ENTRYPOINT": ["/bin/sh", "-c", "echo own entry point"], "ENV": "GIVEN=image"})
        yield here


def image_config(lab: Lab, docker: DockerHere, **changes: Any) -> AgentConfig:
    return lab.config(engine_socket=docker.socket, **changes)


def image_launch(
    lab: Lab, config: AgentConfig, *commands: str, image: str = IMAGE, memory_bytes: int = 64 << 20, **changes: Any
) -> LaunchDescription:
    launch = description(lab.region, config, *commands, **changes)
    body = launch.model_dump(mode="json")
    for job in body["jobs"].values():
        job["image"] = image
    for place in body["tasks"]:
        place.update(memory_bytes=memory_bytes, cpus_milli=500)
    launch = LaunchDescription.model_validate(body)
    lab.write(launch)
    return launch


LOOK = r"""
id -u; id -g
cat /proc/self/status | grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):'
touch /x /etc/x /bin/x 2>/dev/null && echo wrote the image
ls /work /home /root /var/run/docker.sock /run/docker.sock 2>/dev/null || true
test "$PWD" = "$HOME" && echo at home
touch file && echo works > /tmp/t && echo "$GIVEN $RANK"
test -w "${MIZZEN_REPORT%/*}" && echo '{"step": 7}' > "$MIZZEN_REPORT"
touch "$HOME/../x" 2>/dev/null && echo wrote the folder
echo "processes: $(ls /proc | grep -c '^[0-9]*$')"
"""


async def test_a_task_runs_as_a_container_without_privileges(lab: Lab, docker: DockerHere) -> None:
    """It has the tenant's user, no capabilities, a read-only image, its folders and nothing else of the machine."""
    config = image_config(lab, docker)
    launch = image_launch(lab, config, LOOK)
    async with lab.agent(config):
        outcome: NodeOutcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
    run = lab.folder_of(launch, config)
    said = run.output.read_text().split("\n")
    assert outcome.exits[0].succeeded, said
    assert said[:2] == [str(uid_of(config))] * 2
    status = dict(line.split(":\t") for line in said[2:6])
    assert status == {
        "CapEff": "0" * 16, "CapBnd": "0" * 16, "NoNewPrivs": "1", "Seccomp": "2"
    }  # fmt: skip
    assert said[6:8] == ["at home", "image 0"]
    assert int(said[8].removeprefix("processes: ")) < 8
    assert (run.work / "file").stat().st_uid == uid_of(config)
    assert outcome.progress[0].step == 7
    assert docker.engine.containers({}) == []
    assert not list(Path("/sys/fs/cgroup").glob(f"*/mizzen-{run.run_id}"))
    await until_async(lambda: not (run.path.parent / "private").exists())  # The shim removes it after the exit record.


async def test_commands_and_exit_statuses(lab: Lab, docker: DockerHere) -> None:
    """`run` replaces the entry point, a list needs no shell, and without a command the image's own runs."""
    config = image_config(lab, docker)
    script = image_launch(lab, config, "echo to stdout; echo to stderr >&2; exit 7")
    listed = image_launch(lab, config, "true").model_copy(
        update={"jobs": {"main": script.jobs["main"].model_copy(update={"script": None, "argv": ("id", "-u")})}}
    )
    own = listed.model_copy(
        update={"jobs": {"main": script.jobs["main"].model_copy(update={"script": None})}, "workload_id": "wl-own"}
    )
    missing = own.model_copy(
        update={
            "jobs": {"main": script.jobs["main"].model_copy(update={"script": None, "argv": ("missing",)})},
            "workload_id": "wl-missing",
        }
    )
    outcomes = []
    async with lab.agent(config):
        for launch in (script, listed, own, missing):
            lab.write(launch)
            outcomes.append(await (await lab.run(launch, config.machine)).result(NodeOutcome))
    codes = [(one.exits[0].exit_code, one.exits[0].signal) for one in outcomes]
    assert codes == [(7, None), (0, None), (0, None), (127, None)]
    said = [lab.folder_of(launch, config).output.read_text() for launch in (script, listed, own, missing)]
    assert sorted(said[0].splitlines()) == ["to stderr", "to stdout"]
    assert said[1:3] == [f"{uid_of(config)}\n", "own entry point\n"]
    assert "missing" in said[3]
    assert await until_async(lambda: lab.log(script)[1])
    assert lab.log(script)[0].decode() == said[0]


SAVES = "trap 'sleep 0.3; echo saved; exit 5' TERM; touch ready; while true; do sleep 0.1; done"


@pytest.mark.parametrize(("command", "exit_"), [(SAVES, (5, None)), ("touch ready; exec sleep 600", (None, SIGTERM))])
async def test_a_stop_gives_notice_and_waits(
    lab: Lab, docker: DockerHere, command: str, exit_: tuple[int | None, int | None]
) -> None:
    """The task's process gets SIGTERM, also one without a handler, which the first of a container would not get."""
    config = image_config(lab, docker)
    launch = image_launch(lab, config, command, grace_s=60)
    run = lab.folder_of(launch, config)
    async with lab.agent(config):
        running = await lab.run(launch, config.machine)
        await until_async(lambda: (run.work / "ready").exists())
        outcome = await lab.stop(launch, config.machine, 60)
        await running.result(NodeOutcome)
    assert outcome.stopped
    assert (outcome.exits[0].exit_code, outcome.exits[0].signal) == exit_
    assert run.output.read_text() == ("saved\n" if exit_[0] else "")


async def test_a_stubborn_task_is_killed_at_the_deadline(lab: Lab, docker: DockerHere) -> None:
    """Also its children, which are in the container."""
    config = image_config(lab, docker)
    launch = image_launch(lab, config, "trap '' TERM; (trap '' TERM; sleep 600) & touch ready; sleep 600", grace_s=60)
    run = lab.folder_of(launch, config)
    async with lab.agent(config):
        running = await lab.run(launch, config.machine)
        await until_async(lambda: (run.work / "ready").exists())
        outcome = await lab.stop(launch, config.machine, 0.5)
        await running.result(NodeOutcome)
    assert outcome.exits[0].signal == SIGKILL
    assert docker.engine.containers({}) == []


async def test_a_task_outlives_its_agent(lab: Lab, docker: DockerHere) -> None:
    """The next agent re-attaches to the container, whose output and exit status are complete."""
    config = image_config(lab, docker)
    launch = image_launch(
        lab, config, "echo begun; touch ready; until [ -e go ]; do sleep 0.1; done; echo over; exit 3"
    )
    run = lab.folder_of(launch, config)
    async with lab.agent(config):
        running = await lab.run(launch, config.machine)
        await until_async(lambda: (run.work / "ready").exists())
    assert len(docker.engine.containers({"mizzen.run": run.run_id})) == 1
    async with lab.agent(config):
        (run.work / "go").touch()
        outcome: NodeOutcome = await running.result(NodeOutcome)
    assert outcome.exits[0].exit_code == 3
    assert run.output.read_text() == "begun\nover\n"


async def test_a_killed_shim_leaves_no_container(lab: Lab, docker: DockerHere) -> None:
    """The agent ends the container, and reports that the exit status is unknown."""
    config = image_config(lab, docker)
    launch = image_launch(lab, config, "touch ready; sleep 600")
    run = lab.folder_of(launch, config)
    async with lab.agent(config):
        running = await lab.run(launch, config.machine)
        await until_async(lambda: (run.work / "ready").exists())
        identities = run.identities()
        assert identities is not None
        os.kill(identities[0].pid, SIGKILL)
        outcome: NodeOutcome = await running.result(NodeOutcome)
    assert (outcome.exits[0].exit_code, outcome.exits[0].signal) == (None, None)
    assert docker.engine.containers({}) == []
    assert not list(Path("/sys/fs/cgroup").glob(f"*/mizzen-{run.run_id}"))


async def test_limits(lab: Lab, docker: DockerHere) -> None:
    """A task with too much memory is out of memory, and one with too many processes gets no more."""
    config = image_config(lab, docker, processes_per_task=20, processes_per_cpu=0)
    fills = image_launch(lab, config, "tail /dev/zero > /dev/null")
    forks = image_launch(lab, config, "n=0; while [ $n -lt 40 ]; do sleep 5 & n=$((n+1)); done; echo all")
    async with lab.agent(config):
        full: NodeOutcome = await (await lab.run(fills, config.machine)).result(NodeOutcome)
        many: NodeOutcome = await (await lab.run(forks, config.machine)).result(NodeOutcome)
    assert full.exits[0].memory_limit_bytes == 64 << 20
    assert not many.exits[0].succeeded
    assert "all" not in lab.folder_of(forks, config).output.read_text()


async def test_tasks_of_an_attempt_share_memory(lab: Lab, docker: DockerHere) -> None:
    """Also `/tmp`; another attempt sees neither."""
    config = image_config(lab, docker)
    waits = "until [ -s /dev/shm/x ] && [ -s /tmp/x ]; do sleep 0.1; done; touch done"
    launch = image_launch(
        lab, config, "echo 1 > /dev/shm/x; echo 1 > /tmp/x; until [ -e go ]; do sleep 0.1; done", waits
    )
    other = image_launch(lab, config, "ls /dev/shm /tmp")
    first, second = (lab.folder_of(launch, config, task=task) for task in (0, 1))
    async with lab.agent(config):
        running = await lab.run(launch, config.machine)
        await until_async(lambda: (second.work / "done").exists())
        await (await lab.run(other, config.machine)).result(NodeOutcome)
        (first.work / "go").touch()
        outcome: NodeOutcome = await running.result(NodeOutcome)
    assert all(exit_.succeeded for exit_ in outcome.exits)
    assert "x" not in lab.folder_of(other, config).output.read_text()


@pytest.mark.rotating
async def test_the_engine_may_restart(lab: Lab, docker: DockerHere) -> None:
    """A container of an engine with live restore goes on; its later output and its exit status are recorded."""
    config = image_config(lab, docker)
    launch = image_launch(
        lab, config, "echo begun; touch ready; until [ -e go ]; do sleep 0.1; done; echo over; exit 4"
    )
    run = lab.folder_of(launch, config)
    async with lab.agent(config):
        running = await lab.run(launch, config.machine)
        await until_async(lambda: (run.work / "ready").exists())
        await until_async(lambda: docker.docker("ps", "-q"))  # Else dockerd ends a container that has just started.
        await asyncio.to_thread(docker.stop)
        await asyncio.to_thread(docker.start)
        (run.work / "go").touch()
        outcome: NodeOutcome = await running.result(NodeOutcome)
    assert outcome.exits[0].exit_code == 4
    assert run.output.read_text().splitlines()[0] == "begun"


async def test_an_image_that_is_not_there_is_told(lab: Lab, docker: DockerHere) -> None:
    """The error names the image and what the engine says; on a machine without an engine, too."""
    config = image_config(lab, docker)
    launch = image_launch(lab, config, "true", image="127.0.0.1:9/none:1")
    async with lab.agent(config):
        failure = await (await lab.run(launch, config.machine, attempts=1)).failure()
    assert failure.type == "ImageUnavailable"
    assert "127.0.0.1:9/none:1" in str(failure)
    docker.load("empty:1")
    launch = image_launch(lab, config, "true", image="empty:1")
    lab.write(
        own := launch.model_copy(update={"jobs": {"main": launch.jobs["main"].model_copy(update={"script": None})}})
    )
    async with lab.agent(config):
        failure = await (await lab.run(own, config.machine, attempts=1)).failure()
    assert failure.type == "BadImage"
    without = lab.config("m2")
    launch = image_launch(lab, without, "true")
    async with lab.agent(without):
        failure = await (await lab.run(launch, without.machine, attempts=1)).failure()
    assert "no container engine" in str(failure)


@pytest.mark.parametrize("place", ["$PWD", "/tmp", "/var/tmp"])
async def test_a_task_that_fills_the_disk_is_stopped(lab: Lab, docker: DockerHere, disk: Path, place: str) -> None:
    """Also with a file that is deleted and still open, which only the processes in the container have."""
    config = image_config(lab, docker, state_dir=disk / "state")
    command = (
        f"exec 3> {place}/big; rm {place}/big; while true; do head -c 1000000 /dev/zero >&3 || true; sleep 0.02; done"
    )
    # More than the disk has: its files are in memory.
    launch = image_launch(lab, config, command, memory_bytes=256 << 20)
    async with lab.agent(config):
        outcome: NodeOutcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
    assert outcome.exits[0].disk is not None, lab.folder_of(launch, config).output.read_text()


async def test_containers_that_nothing_watches_are_removed(lab: Lab, docker: DockerHere) -> None:
    """Those of the machine whose folders are gone, and no others."""
    config = image_config(lab, docker)
    for name, machine in (("left", config.machine), ("other", "r/c/other")):
        docker.docker("run", "-d", "--name", name, "--network=host", "--label", f"mizzen.machine={machine}", IMAGE)
    async with lab.agent(config):
        await until_async(lambda: docker.engine.state("left") is None)
    assert docker.engine.state("other") is not None
    docker.engine.remove("other")


async def test_a_container_has_its_mounts(lab: Lab, docker: DockerHere) -> None:
    """At an absolute path, the task finds a folder that it may write to."""
    config = image_config(lab, docker)
    launch = with_mounts(image_launch(lab, config, "echo model > /models/file && cat /models/file"), "/models")
    lab.write(launch)
    async with lab.agent(config):
        outcome: NodeOutcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
    said = lab.folder_of(launch, config).output.read_text()
    assert outcome.exits[0].succeeded and said == "model\n", said


async def test_an_image_with_python_and_without_mizzen(lab: Lab, docker: DockerHere) -> None:
    """It gets the SDK, whose reports and checkpoints work, and what the image has of its own stays in effect."""
    docker.load("bare:1", {"ENV": "PYTHONPATH=/etc"}, bare=True)
    config = image_config(lab, docker, paths=("/usr",))
    program = """
import mizzen, sys
with mizzen.Checkpointer() as checkpoints:
    print(checkpoints.load_latest())
    checkpoints.save(5, {"weights": [1, 2]})
mizzen.progress(step=5)
print(mizzen.__file__, "/etc" in sys.path, "/run/mizzen/python" in sys.path)
"""
    checkpoints = Path(f"{config.state_dir}-checkpoints")
    checkpoints.mkdir(parents=True)
    os.chown(checkpoints, uid_of(config), uid_of(config))
    launch = image_launch(lab, config, f"cat > p.py <<'END'\n{program}\nEND\npython3 p.py", image="bare:1")
    async with lab.agent(config):
        outcome: NodeOutcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
    said = lab.folder_of(launch, config).output.read_text()
    assert outcome.exits[0].succeeded, said
    assert outcome.progress[0].step == 5
    assert said.split() == ["None", "/run/mizzen/sdk/mizzen/__init__.py", "True", "False"]


async def test_gpus_are_those_that_the_attempt_holds(lab: Lab, docker: DockerHere, fake_gpus: FakeGpus) -> None:
    """The engine is asked for them; this one has no toolkit of NVIDIA, and says so. Other images get no GPU."""
    config = image_config(lab, docker, gpu_type="a100", gpus=2)
    launch = image_launch(lab, config, 'echo "sees $NVIDIA_VISIBLE_DEVICES"')
    none = launch.model_copy(update={"tasks": tuple(task.model_copy(update={"slots": ()}) for task in launch.tasks)})
    none = none.model_copy(update={"workload_id": "wl-none"})
    lab.write(none)
    async with lab.agent(config):
        outcome = await (await lab.run(none, config.machine)).result(NodeOutcome)
        assert [end.exit_code for end in outcome.exits] == [0]
        await until_async(lambda: lab.log(none)[1])
        outcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
        await until_async(lambda: lab.log(launch)[1])
    assert lab.log(none)[0] == b"sees void\n"
    assert [end.succeeded for end in outcome.exits] == [False]
    assert b"could not select device driver" in lab.log(launch)[0] and b"gpu" in lab.log(launch)[0]
    held = HeldGpus.of([1])
    assert held.ids() == ("GPU-1",) and held.visible([1]) == [0]


GANG = """
own=${MIZZEN_CHECKPOINT_URI#file://}
step=$(cat $own/step.$RANK 2>/dev/null || echo 0)
trap 'echo $step > $own/step.$RANK; exit 75' TERM
echo "from $step"
if [ $RANK = 0 ]; then
    { echo "rank 0"; sleep 0.5; } | nc -l -p $MASTER_PORT  # The other nc ends when this one's input ends.
else
    until echo "rank 1" | nc $MASTER_ADDR $MASTER_PORT 2>/dev/null; do sleep 0.1; done
fi
while [ $step -lt 40 ]; do
    step=$((step + 1))
    touch at.$step
    if [ $step = 20 ] && [ ! -e $own/step.$RANK ]; then while :; do sleep 0.1; done; fi
done
echo "at $step"
"""


@pytest.mark.rotating
async def test_a_gang_without_python_meets_saves_and_resumes(lab: Lab, docker: DockerHere) -> None:
    """All it needs are variables, files, SIGTERM and exit statuses. Both tasks of each attempt exchange their names."""
    config = image_config(lab, docker)
    checkpoints = Path(f"{config.state_dir}-checkpoints")
    checkpoints.mkdir(parents=True)
    os.chown(checkpoints, uid_of(config), uid_of(config))
    first = image_launch(lab, config, GANG, GANG, grace_s=60)
    second = first.model_copy(update={"attempt": 2})
    async with lab.agent(config):
        lab.write(first)
        ports = (await lab.prepare(first, config.machine, ["main"])).ports
        running = await lab.run(first, config.machine, {"main": f"127.0.0.1:{ports['main']}"})
        works = [lab.folder_of(first, config, task=task).work for task in (0, 1)]
        await until_async(lambda: all((work / "at.20").exists() for work in works), 60.0)
        stopped = await lab.stop(first, config.machine, 60)
        await running.result(NodeOutcome)
        assert [end.exit_code for end in stopped.exits] == [75, 75]
        lab.write(second)
        ports = (await lab.prepare(second, config.machine, ["main"])).ports
        outcome: NodeOutcome = await (
            await lab.run(second, config.machine, {"main": f"127.0.0.1:{ports['main']}"})
        ).result(NodeOutcome)
    said = [lab.folder_of(second, config, task=task).output.read_text().splitlines() for task in (0, 1)]
    assert [end.exit_code for end in outcome.exits] == [0, 0], said
    assert said == [["from 20", "rank 1", "at 40"], ["from 20", "rank 0", "at 40"]]


@pytest.mark.long
def test_gpus_by_cdi() -> None:
    """Podman gives a container the devices that a CDI file describes for its GPUs, and no others."""
    device = {"path": "/dev/nvidia7", "hostPath": "/dev/null"}
    edits = [{"deviceNodes": [device], "env": ["CDI_GPU=seven"]}, {"env": ["CDI_OTHER=yes"]}]
    devices = [{"name": f"GPU-{n}", "containerEdits": one} for n, one in enumerate(edits)]
    spec = Path("/var/run/cdi/mizzen-test.json")
    with podman_here() as here:
        here.load(IMAGE)
        spec.parent.mkdir(exist_ok=True)
        spec.write_text(json.dumps({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices}))
        try:
            look = ("/bin/sh", "-c", "ls /dev/nvidia7; echo $CDI_GPU $CDI_OTHER")
            body = {"name": "cdi", "image": IMAGE, "argv": look, "cwd": "/", "user": "0:0", "gpus": ("GPU-0",)}
            here.engine.create(Container.from_json({**body, "env": {}, "mounts": {}, "tmpfs": {}, "labels": {}}))
            pieces = here.engine.output("cdi")
            here.engine.start("cdi")
            assert b"".join(text for _, text in pieces).split() == [b"/dev/nvidia7", b"seven"]
        finally:
            spec.unlink()
