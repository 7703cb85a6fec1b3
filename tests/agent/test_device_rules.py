"""Tasks cannot open GPUs that their attempt does not hold, with device files of the test for which there is no driver.

To open such a file fails as "no such device" if it is allowed, and as "not permitted" if it is not.
"""

import errno
import os
import subprocess
import uuid
from collections.abc import Iterable
from pathlib import Path

import pytest

from agent import device_rules
from agent.cgroups import device_cgroup, make_cgroup, remove_cgroup
from domain.ids import checkpoint_prefix
from domain.isolation import Isolation
from domain.launch import LaunchDescription
from domain.protocol.machines import NodeOutcome
from tests.agent.harness import Lab, description, until_async

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make device files")
MINORS = {"0000:3f:00.0": 2, "0000:5e:00.0": 0, "0000:b1:00.0": 3, "0001:01:00.0": 1}
"""Minor numbers of GPUs by PCI address, in the order of the slots."""
ALLOWED, DENIED, HIDDEN = map(os.strerror, (errno.ENXIO, errno.EPERM, errno.ENOENT))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the device files of four GPUs, and what the driver and the kernel show of them."""
    root = tmp_path / "machine"
    numbers = {f"nvidia{minor}": (195, minor) for minor in MINORS.values()} | {"nvidiactl": (195, 255)}
    for number, (bus, minor) in enumerate(MINORS.items()):
        numbers[f"dri/renderD{128 + number}"] = render = (226, 128 + number)
        information = root / "proc/driver/nvidia/gpus" / bus / "information"
        information.parent.mkdir(parents=True)
        information.write_text(f"Device Minor: \t {minor}\n")
        shown = root / "sys/bus/pci/devices" / bus / f"drm/renderD{render[1]}/dev"
        shown.parent.mkdir(parents=True)
        shown.write_text("{}:{}\n".format(*render))
    for name, (major, least) in numbers.items():
        path = root / "dev" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.mknod(path, 0o666 | 0o020000, os.makedev(major, least))
            path.chmod(0o666)
            os.close(os.open(path, os.O_RDWR))
        except OSError as error:
            if error.errno != errno.ENXIO:
                pytest.skip(f"device files cannot be used here: {error}")
    monkeypatch.setattr(device_rules, "ROOT", root)
    return root


@pytest.mark.parametrize("version", [1, 2])
def test_rules_of_cgroups(machine: Path, version: int) -> None:
    """With both versions of cgroups, exactly the other GPUs and their graphics devices are refused."""
    run_id = f"rules-{uuid.uuid4().hex}"
    cgroup = make_cgroup(run_id) if version == 2 else None
    try:
        if version == 2 and cgroup is None:
            pytest.skip("this machine has no cgroup v2")
        try:
            path = device_rules.close(cgroup, run_id, device_rules.HeldGpus.of([3, 1]).closed())
        except OSError as error:
            pytest.skip(f"version {version} of cgroups has no rules for devices here: {error}")
        if version == 2:
            assert path == cgroup
        opens = _opens([*(machine / "dev").glob("nvidia*"), *(machine / "dev/dri").iterdir(), "/dev/null"])
        command = ["sh", "-c", f"echo 0 > {path}/cgroup.procs; {opens}"]
        said = subprocess.run(command, capture_output=True, text=True, check=True, env={"LC_ALL": "C"}).stdout
    finally:
        for made in filter(None, (cgroup, None if version == 2 else device_cgroup(run_id))):
            remove_cgroup(made)
    allowed = {"nvidia0", "nvidia1", "nvidiactl", "renderD129", "renderD131"}
    denied = {"nvidia2", "nvidia3", "renderD128", "renderD130"}
    assert _answers(said.splitlines()) == dict.fromkeys(allowed, ALLOWED) | dict.fromkeys(denied, DENIED)


def _opens(paths: Iterable[object]) -> str:
    """Returns a command that opens each file and prints the error."""
    return f"for path in {' '.join(map(str, paths))}; do cat $path 2>&1 || true; done"


def _answers(lines: list[str]) -> dict[str, str]:
    """Returns the errors that the command has printed, by name of the file."""
    return {path.rpartition("/")[2]: error for _, path, error in (line.split(": ") for line in lines)}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("mode", list(Isolation))
async def test_tasks_open_the_gpus_of_their_attempt(
    open_lab: Lab, machine: Path, mode: Isolation, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tasks of an attempt open its GPUs, also those of each other, and no others. They number these from 0.

    The files are at their usual place in a sandbox, and the others are missing there.
    """
    if version == 1:
        monkeypatch.setattr(device_rules, "_attach", _no_programs)
    lab, root = open_lab, machine.rename(open_lab.folder / "machine")
    monkeypatch.setattr(device_rules, "ROOT", root)
    dev = "/dev" if mode is Isolation.SANDBOX else f"{root}/dev"
    config = lab.config(isolation=mode)
    names = [*(f"nvidia{minor}" for minor in range(4)), "nvidiactl", "dri/renderD128", "dri/renderD129"]
    command = f"(echo $CUDA_VISIBLE_DEVICES; {_opens(f'{dev}/{name}' for name in names)}) > {lab.folder}/said.$RANK"
    launch = description(lab.region, config, command, command)
    launch = _with_slots(launch, (3,), (1,))
    lab.write(launch)
    async with lab.agent(config):
        outcome: NodeOutcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
    assert all(exit_.succeeded for exit_ in outcome.exits), lab.folder_of(launch, config).output.read_text()
    other = HIDDEN if mode is Isolation.SANDBOX else DENIED
    found = {"nvidia0": ALLOWED, "nvidia1": ALLOWED, "nvidia2": other, "nvidia3": other, "nvidiactl": ALLOWED}
    found |= {"renderD128": other, "renderD129": ALLOWED}
    for task, number in ((0, "1"), (1, "0")):
        said = (lab.folder / f"said.{task}").read_text().splitlines()
        assert (said[0], _answers(said[1:])) == (number, found)
    run_id = lab.folder_of(launch, config).run_id
    await until_async(lambda: not list(Path("/sys/fs/cgroup").glob(f"*/mizzen-{run_id}")))


@pytest.mark.parametrize("version", [1, 2])
async def test_programs_that_check_a_store_open_the_gpus_of_their_attempt(
    open_lab: Lab, machine: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job's variables can name a program, which runs before the task to read the store of the checkpoints."""
    if version == 1:
        monkeypatch.setattr(device_rules, "_attach", _no_programs)
    lab, root = open_lab, machine.rename(open_lab.folder / "machine")
    monkeypatch.setattr(device_rules, "ROOT", root)
    config = lab.config(isolation=Isolation.NONE, bucket_url=lab.bucket_url)
    files = {
        "aws": "[default]\ncredential_process = sh ./look\nregion = us-east-1\n",
        "look": f"({_opens(f'{root}/dev/nvidia{minor}' for minor in range(4))}) > said\nexit 1\n",
    }
    launch = _with_slots(description(lab.region, config, "true"), (3,))
    uri = f"s3://somewhere/{checkpoint_prefix(launch.workload_id)}"
    job = launch.jobs["main"].model_copy(update={"env": {"AWS_CONFIG_FILE": "aws"}})
    checkpoint = launch.checkpoint.model_copy(update={"uri": uri})
    launch = launch.model_copy(update={"checkpoint": checkpoint, "jobs": {"main": job}, "files": files})
    lab.write(launch)
    async with lab.agent(config):
        await (await lab.run(launch, config.machine, attempts=1)).failure()
    run = lab.folder_of(launch, config)
    expected = {f"nvidia{minor}": ALLOWED if minor == 1 else DENIED for minor in range(4)}
    assert _answers((run.work / "said").read_text().splitlines()) == expected
    await until_async(lambda: not list(Path("/sys/fs/cgroup").glob(f"*/mizzen-{run.run_id}*")))


def _with_slots(launch: LaunchDescription, *slots: tuple[int, ...]) -> LaunchDescription:
    places = tuple(launch.tasks[task].model_copy(update={"slots": held}) for task, held in enumerate(slots))
    return launch.model_copy(update={"tasks": places})


def _no_programs(cgroup: str, closed: object) -> None:
    raise OSError("this kernel has no such programs")


async def test_without_rules_the_numbers_are_those_of_the_machine(
    lab: Lab, machine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If nothing hides the other GPUs, a task sees them all, so it needs the machine's numbers. The agent says so."""
    config = lab.config(isolation=Isolation.NONE, cgroup=False)
    launch = description(lab.region, config, f"echo $CUDA_VISIBLE_DEVICES > {lab.folder}/said")
    launch = _with_slots(launch, (1, 3))
    lab.write(launch)
    async with lab.agent(config):
        await (await lab.run(launch, config.machine)).result(NodeOutcome)
    assert (lab.folder / "said").read_text() == "1,3\n"
    assert "tasks can open GPUs of other tasks on this machine: cgroups are switched off" in caplog.text
