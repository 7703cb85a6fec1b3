"""Credentials of tasks, on emulators of the clouds behind a proxy that enforces what the credentials allow."""

import asyncio
import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google.auth
import pytest
from google.oauth2.credentials import Credentials

from agent.config import AgentConfig
from agent.credentials.aws import session_policy
from agent.credentials.scope import BucketScope, Prefix, bucket_scope
from agent.credentials.task_credentials import TaskCredentials
from bench import buckets
from domain.ids import checkpoint_marker_key, checkpoint_prefix
from domain.launch import LaunchDescription
from domain.protocol.machines import NodeOutcome
from mizzen.objects import open_store
from tests.agent.harness import Lab, description, run_folder
from tests.agent.narrowed_stores import ADMIN_KEY, ADMIN_TOKEN, Narrowed, narrowed

_ATTACK = """
import json, os, sys
from mizzen.objects import open_store
from mizzen.objects.urls import open_store
url, own, table = sys.argv[1:]
store = open_store(url)
def tried(name, work):
    try:
        said[name] = work() or "done"
    except Exception as error:
        refused = any(word in str(error) for word in ("403", "AccessDenied", "Forbidden"))
        said[name] = "refused" if refused else repr(error)
said = {}
def save():
    mine = open_store(os.environ["MIZZEN_CHECKPOINT_URI"])
    mine.put("step-1/part", b"saved")
    found = mine.get("step-1/part").decode(), [info.key for info in mine.list("step-1/")]
    mine.delete("step-1/part")
    return found
tried("save", save)
tried("read_table", lambda: store.get(table + "part-0").decode())
tried("list_table", lambda: [info.key for info in store.list(table)])
tried("write_table", lambda: store.put(table + "part-0", b"changed"))
tried("read_checkpoint", lambda: store.get("checkpoints/wl-other/part").decode())
tried("list_checkpoints", lambda: [info.key for info in store.list("checkpoints/")])
tried("list_similar", lambda: [info.key for info in store.list(own.rstrip("/") + "0/")])
tried("write_checkpoint", lambda: store.put("checkpoints/wl-other/part", b"changed"))
tried("delete_checkpoint", lambda: store.delete("checkpoints/wl-other/part"))
tried("read_other_table", lambda: store.get("tables/secret/part-0").decode())
tried("read_launch", lambda: store.get("launches/wl-other/1/x.json").decode())
tried("read_log", lambda: store.get("logs/wl-other/1/main/0/00000000000000000000.log").decode())
said["environment"] = sorted(name for name, value in os.environ.items() if "agent-" in value)
print(json.dumps(said))
"""
_SEEDED = (
    "tables/own/part-0", "tables/secret/part-0", "checkpoints/wl-other/part", "launches/wl-other/1/x.json",
    "logs/wl-other/1/main/0/00000000000000000000.log",
)  # fmt: skip


@pytest.fixture(params=["s3", "gs"])
def cloud(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Narrowed, buckets.EmulatorEndpoint]]:
    """A store whose credentials only the agent has, which runs in this process."""
    with buckets.s3() if request.param == "s3" else buckets.gcs() as endpoint, narrowed(endpoint) as proxy:
        if request.param == "s3":
            monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", ADMIN_KEY)
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "agent-secret")
            monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        else:
            source: Any = Credentials(ADMIN_TOKEN)  # type: ignore[no-untyped-call]
            monkeypatch.setattr(source, "refresh", lambda _: None)
            monkeypatch.setattr(google.auth, "default", lambda **_: (source, "project"))
            monkeypatch.setattr("google.auth.downscoped._STS_TOKEN_URL_PATTERN", f"{proxy.url}/v1/token")
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint.url)
        yield proxy, endpoint


def _launch(lab: Lab, config: AgentConfig, url: str, proxy: Narrowed) -> LaunchDescription:
    launch = description(lab.region, config, 'exec "$MIZZEN_PYTHON" attack.py "$BUCKET" "$OWN" tables/own/')
    own = checkpoint_prefix(launch.workload_id)
    env = {"BUCKET": url, "OWN": own}
    if url.startswith("gs:"):
        env["STORAGE_EMULATOR_HOST"] = proxy.url
    launch = launch.model_copy(
        update={
            "checkpoint": launch.checkpoint.model_copy(update={"uri": f"{url}/{own}"}),
            "tables": {"own": f"{url}/tables/own/"},
            "files": {"attack.py": _ATTACK},
            "jobs": {"main": launch.jobs["main"].model_copy(update={"env": env})},
        }
    )
    lab.write(launch)
    return launch


@pytest.mark.rotating
@pytest.mark.timeout(120)
async def test_a_task_reaches_only_what_its_document_names(
    lab: Lab, cloud: tuple[Narrowed, buckets.EmulatorEndpoint]
) -> None:
    """A task without credentials of its own gets some: for its checkpoints to write, and for its tables to read."""
    proxy, endpoint = cloud
    url = endpoint.bucket()
    for key in _SEEDED:
        open_store(url).put(key, b"content")
    config = lab.config(bucket_url=lab.bucket_url, s3_role="arn:aws:iam::123456789012:role/tasks", gcs_tokens=True)
    launch = _launch(lab, config, url, proxy)
    open_store(url).put(checkpoint_marker_key(launch.workload_id), b"x")
    async with lab.agent(config):
        outcome: NodeOutcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
        while not (log := lab.log(launch))[1]:
            await asyncio.sleep(0.1)
    assert [end.exit_code for end in outcome.exits] == [0], log[0].decode()
    said = json.loads(log[0].decode().splitlines()[-1])
    assert said.pop("save") == ["saved", ["step-1/part"]]
    assert said.pop("read_table") == "content" and said.pop("list_table") == ["tables/own/part-0"]
    assert said.pop("environment") == []
    assert len(said) == 9 and set(said.values()) == {"refused"}, said
    assert len(proxy.issued) == 1 and len(proxy.refused) >= 9
    assert not (lab.folder_of(launch, config).path / "credentials").exists(), "they are removed after the end"
    assert open_store(url).get("checkpoints/wl-other/part") == b"content"


@pytest.mark.timeout(120)
async def test_a_role_that_cannot_be_assumed_starts_no_task(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch is tried again, and nobody is blamed. The reason says what is missing."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    config = lab.config(bucket_url=lab.bucket_url, s3_role="arn:aws:iam::123456789012:role/tasks")
    launch = _launch(lab, config, "s3://somewhere", Narrowed(""))
    async with lab.agent(config):
        failure = await (await lab.run(launch, config.machine, attempts=1)).failure()
    assert failure.type == "BucketUnavailable" and "credentials of the tasks: Unable to locate credentials" in str(
        failure
    )
    assert not (lab.folder_of(launch, config).work / "attack.py.done").exists()


async def test_they_are_renewed_before_they_expire(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is replaced after half of the lifetime, the task may only read it, and a refusal changes nothing."""
    with buckets.s3() as endpoint, narrowed(endpoint) as proxy:
        for name, value in {**endpoint.environ, "AWS_ENDPOINT_URL": proxy.url, "AWS_ACCESS_KEY_ID": ADMIN_KEY}.items():
            monkeypatch.setenv(name, value)
        config = lab.config(s3_role="arn:aws:iam::123456789012:role/tasks")
        launch = _launch(lab, config, "s3://somewhere", proxy)
        run = run_folder(lab.folder / "run")
        credentials = TaskCredentials(config, launch, [run], config.owner_of(0))
        credentials.issue()
        credentials.issue()
        assert len(proxy.issued) == 1, "fresh ones are kept"
        file = run.path / "credentials" / "aws.json"
        first = file.read_bytes()
        assert stat.S_IMODE(file.stat().st_mode) == 0o400
        owner = config.owner_of(0)
        assert file.stat().st_uid == (os.geteuid() if owner is None else owner.uid)
        assert file.parent.stat().st_uid == os.geteuid()
        _age(file)
        keeping = asyncio.create_task(credentials.keep())
        while file.read_bytes() == first:
            await asyncio.sleep(0.05)
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        now = file.read_bytes()
        _age(file)
        await asyncio.sleep(2.0)
        keeping.cancel()
        assert file.read_bytes() == now != first
        credentials.remove()
        assert not file.exists()


def _age(file: Path) -> None:
    """Makes credentials that are valid for an hour half an hour old."""
    os.utime(file, (time.time() - 1801,) * 2)


def test_a_long_policy_allows_all_tables() -> None:
    """A policy of STS has at most 2,048 characters. Checkpoints stay exact."""
    own = (Prefix("b", "r/checkpoints/wl-1/"),)
    few = session_policy(BucketScope(own, (Prefix("b", "r/tables/a*b/"),)))
    assert "r/tables/a${*}b/*" in few
    many = session_policy(
        BucketScope(own, tuple(Prefix("b", f"r/tables/table-with-a-long-name-{n}/") for n in range(60)))
    )
    assert len(many) <= 2048
    assert '"arn:aws:s3:::b/r/tables/*"' in many and '"arn:aws:s3:::b/r/checkpoints/wl-1/*"' in many


def test_stores_of_other_kinds_are_left_out(lab: Lab) -> None:
    """Folders need no credentials, and each cloud gets its own prefixes."""
    launch = description(lab.region, lab.config(), "true")
    tables = {"a": "gs://bucket/x/tables/a/", "b": "s3://other/tables/b/"}
    launch = launch.model_copy(update={"tables": tables})
    assert launch.checkpoint.uri.startswith("file:")
    assert bucket_scope(launch, "s3") == BucketScope((), (Prefix("other", "tables/b/"),))
    assert bucket_scope(launch, "gs") == BucketScope((), (Prefix("bucket", "x/tables/a/"),))
    assert not bucket_scope(launch.model_copy(update={"tables": {}}), "s3")
    assert Path(launch.checkpoint.uri.removeprefix("file://")).name.endswith("checkpoints")
