"""The agent checks the bucket of a cluster's store as a task finds it, on servers with the protocols of the clouds."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import agent
from agent.config import AgentConfig
from bench import buckets
from domain.ids import checkpoint_marker_key, checkpoint_prefix
from domain.isolation import Isolation
from domain.launch import LaunchDescription
from domain.protocol.machines import NodeOutcome
from mizzen.objects import open_store
from tests.agent.harness import Lab, description


@pytest.fixture(params=["s3", "gs"])
def endpoint(request: pytest.FixtureRequest) -> Iterator[buckets.EmulatorEndpoint]:
    """A server whose address and credentials only tasks get."""
    with buckets.s3() if request.param == "s3" else buckets.gcs() as found:
        yield found


def _launch(lab: Lab, config: AgentConfig, url: str, environ: dict[str, str]) -> LaunchDescription:
    """Returns a launch that saves in the store, with variables of its job."""
    launch = description(lab.region, config, "touch ran", tenant_number=3)
    uri = f"{url}/{checkpoint_prefix(launch.workload_id)}"
    job = launch.jobs["main"].model_copy(update={"env": environ})
    launch = launch.model_copy(
        update={"checkpoint": launch.checkpoint.model_copy(update={"uri": uri}), "jobs": {"main": job}}
    )
    lab.write(launch)
    return launch


def _config(lab: Lab) -> AgentConfig:
    return lab.config(bucket_url=lab.bucket_url)


def _put_marker(
    endpoint: buckets.EmulatorEndpoint, url: str, launch: LaunchDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes the marker as a worker does, whose environment is not that of agents and tasks."""
    with monkeypatch.context() as worker:
        for name, value in endpoint.environ.items():
            worker.setenv(name, value)
        open_store(url).put(checkpoint_marker_key(launch.workload_id), b"x")


@pytest.mark.timeout(120)
async def test_an_empty_bucket_starts_no_task(
    lab: Lab, endpoint: buckets.EmulatorEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tasks would start from the beginning. When the marker is there, they start, with the job's variables."""
    config, url = _config(lab), endpoint.bucket()
    launch = _launch(lab, config, url, endpoint.environ)
    async with lab.agent(config):
        failure = await (await lab.run(launch, config.machine, attempts=1)).failure()
        assert failure.type == "BucketUnavailable"
        assert url in str(failure) and f"checkpoints/{launch.workload_id}/marker is missing" in str(failure)
        assert not (lab.folder_of(launch, config).work / "ran").exists()
        _put_marker(endpoint, url, launch, monkeypatch)
        outcome: NodeOutcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
    assert [e.exit_code for e in outcome.exits] == [0]


@pytest.mark.timeout(120)
async def test_a_store_that_does_not_answer_is_a_reason(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that accepts connections and says nothing: the check ends after its time, and no task starts."""
    monkeypatch.setattr("agent.stores.TIMEOUT_S", 3.0)
    config = _config(lab)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environ = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "k"}
        launch = _launch(lab, config, "s3://somewhere", environ | {"AWS_DEFAULT_REGION": "us-east-1"})
        async with lab.agent(config):
            failure = await (await lab.run(launch, config.machine, attempts=1)).failure()
    assert (failure.type, "no answer within 3 s" in str(failure)) == ("BucketUnavailable", True)
    assert not (lab.folder_of(launch, config).work / "ran").exists()


_LOOKS = """
grep -E '^(NoNewPrivs|Seccomp|CapEff):' /proc/self/status > told
id -u >> told
echo "processes: $(ls -d /proc/[0-9]* | wc -l)" >> told
echo '{"Version": 1, "AccessKeyId": "k", "SecretAccessKey": "k"}'
"""


@pytest.mark.timeout(120)
async def test_programs_of_the_jobs_variables_are_isolated_like_the_task(lab: Lab) -> None:
    """Variables can name programs that give credentials, and files that are loaded into each process."""
    config = _config(lab)
    files = {"aws": "[default]\ncredential_process = sh ./look\nregion = us-east-1\n", "look": _LOOKS}
    environ = {"AWS_CONFIG_FILE": "aws", "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}
    launch = _launch(lab, config, "s3://somewhere", environ).model_copy(update={"files": files})
    lab.write(launch)
    async with lab.agent(config):
        failure = await (await lab.run(launch, config.machine, attempts=1)).failure()
    assert failure.type == "BucketUnavailable", failure
    *status, uid, processes = (lab.folder_of(launch, config).work / "told").read_text().splitlines()
    owner = config.owner_of(3)
    assert uid == str(os.geteuid() if owner is None else owner.uid)
    if config.isolation is Isolation.SANDBOX:
        assert status == ["CapEff:\t" + "0" * 16, "NoNewPrivs:\t1", "Seccomp:\t2"]
        assert int(processes.partition(": ")[2]) < 10


_FLOODED = """
import resource, sys
from agent.launch import TaskLaunch
from agent.stores import WrongStore, check_remote
environ = dict(pair.split("=", 1) for pair in sys.argv[1:])
resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))
try:
    check_remote("s3://somewhere", "wl-1", TaskLaunch((), environ, ".", "output", 1.0), ())
except WrongStore as error:
    print(len(str(error)))
"""


def test_output_of_a_check_takes_no_memory(tmp_path: Path) -> None:
    """A program of the job's variables writes 500 MB to the errors of the check; the agent may take 400."""
    (tmp_path / "aws").write_text("[default]\ncredential_process = sh ./flood\nregion = us-east-1\n")
    (tmp_path / "flood").write_text("head -c 500000000 /dev/zero > /proc/$PPID/fd/2\nexit 1\n")
    environ = {"AWS_CONFIG_FILE": "aws", "PATH": os.environ["PATH"]}
    command = [sys.executable, "-c", _FLOODED, *(f"{name}={value}" for name, value in environ.items())]
    told = {**os.environ, "PYTHONPATH": str(Path(agent.__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=told, capture_output=True, text=True, check=False)
    assert done.stdout and int(done.stdout) < 1000, done.stderr


@pytest.mark.timeout(120)
async def test_a_task_without_credentials_is_not_checked(lab: Lab) -> None:
    """Its script may get them: without credentials it cannot read an empty bucket by mistake."""
    config = _config(lab)
    launch = _launch(lab, config, "s3://somewhere", {"AWS_EC2_METADATA_DISABLED": "true"})
    async with lab.agent(config):
        outcome: NodeOutcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
    assert [e.exit_code for e in outcome.exits] == [0]
    assert Path(lab.folder_of(launch, config).work / "ran").exists()
