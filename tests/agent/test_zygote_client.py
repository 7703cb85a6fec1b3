"""How agents start a launch description: archives, secrets, and the blame for a failed launch."""

import base64
import gzip
import hashlib
import io
import json
import tarfile
from datetime import UTC, datetime
from pathlib import Path

import pytest
from nacl.public import PublicKey, SealedBox

from agent import sealed
from agent.state import StateFolder
from domain.blame import Blame, LaunchError, verdict
from domain.ids import archive_key
from domain.protocol.activities import Activity
from domain.protocol.machines import NodeOutcome, RunNode
from mizzen.objects import open_store
from tests.agent.harness import Lab, description, digest, until_async


async def test_secrets_reach_tasks_and_no_log(lab: Lab) -> None:
    """A sealed secret is in the environment of its job's tasks, and is masked in shipped output."""
    config = lab.config()
    key = PublicKey(base64.b64decode(sealed.public_key(StateFolder(config.state_dir).private_key())))
    secrets = {"main": {"TOKEN": "hunter2-the-long-one"}, "other": {"TOKEN": "not theirs"}}
    box = base64.b64encode(SealedBox(key).encrypt(json.dumps(secrets).encode())).decode()
    launch = description(
        lab.region,
        config,
        "printf 'token %s' hunter2; sleep 0.7; printf -- '-the-long-one|not theirs\\n'; echo $TOKEN | rev; exit 9",
        sealed_secrets={config.machine: box},
    )
    lab.write(launch)
    async with lab.agent(config):
        outcome: NodeOutcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
        await until_async(lambda: lab.log(launch)[1])
    expected = "token ***|***\neno-gnol-eht-2retnuh\n"
    assert lab.log(launch)[0].decode() == expected
    assert "token" not in str(outcome), "task output must not be in Temporal's history"
    for path in config.state_dir.rglob("*.json"):
        assert b"hunter2-the-long-one" not in path.read_bytes()


async def test_what_cannot_be_prepared(lab: Lab) -> None:
    """Archives with path escapes, secrets for another machine, and launches of another attempt fail without a retry."""
    config = lab.config()
    store = open_store(lab.bucket_url)
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("../evil"))
    packed = gzip.compress(body.getvalue())
    sha256 = hashlib.sha256(packed).hexdigest()
    store.put(archive_key(sha256), packed)
    escaping = description(lab.region, config, "true", workdir=sha256)
    other_key = PublicKey(base64.b64decode(sealed.public_key(sealed.new_key())))
    box = base64.b64encode(SealedBox(other_key).encrypt(b"{}")).decode()
    unreadable = description(lab.region, config, "true", sealed_secrets={config.machine: box})
    misplaced = description(lab.region, config, "true")
    for each in (escaping, unreadable):
        lab.write(each)
    store.put(lab.write(misplaced), escaping.model_dump_json().encode())
    async with lab.agent(config):
        for launch, kind in ((escaping, "BadArchive"), (unreadable, "CannotUnseal"), (misplaced, "BadLaunch")):
            sha256 = digest(escaping if launch is misplaced else launch)
            failure = await (await lab.run(launch, config.machine, sha256=sha256)).failure()
            assert (failure.type, failure.non_retryable) == (kind, True), failure
        wrong = RunNode(misplaced.workload_id, 1, f"{lab.region}/c/other", "k", lab.bucket_url, {}, "0" * 64)
        failure = await (await lab.start(Activity.RUN_NODE, config.machine, wrong)).failure()
        assert failure.type == "WrongMachine"
    assert not list(lab.folder.rglob("evil"))


async def test_an_archive_arrives(lab: Lab) -> None:
    """The uploaded working directory is unpacked for each task; an archive with another hash is rejected."""
    config = lab.config()
    store = open_store(lab.bucket_url)
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w") as tar:
        info = tarfile.TarInfo("run.sh")
        info.size, info.mode = 25, 0o755
        tar.addfile(info, io.BytesIO(b"#!/bin/sh\necho packed $1\n"))
    packed = gzip.compress(body.getvalue())
    sha256 = hashlib.sha256(packed).hexdigest()
    store.put(archive_key(sha256), packed)
    launch = description(lab.region, config, "./run.sh a", "./run.sh b", workdir=sha256)
    swapped = description(lab.region, config, "true", workdir="0" * 64)
    store.put(archive_key("0" * 64), packed)
    lab.write(launch)
    lab.write(swapped)
    async with lab.agent(config):
        outcome: NodeOutcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
        assert [e.exit_code for e in outcome.exits] == [0, 0]
        assert [lab.folder_of(launch, config, task=n).output.read_text() for n in (0, 1)] == [
            "packed a\n",
            "packed b\n",
        ]
        failure = await (await lab.run(swapped, config.machine)).failure()
        assert failure.type == "DamagedArchive" and sha256 in str(failure)


async def test_a_launch_description_that_was_changed_is_refused(lab: Lab, tmp_path: Path) -> None:
    """A launch description in the bucket that the scheduler did not write starts no task."""
    config = lab.config()
    launch = description(lab.region, config, f"touch {tmp_path}/good")
    changed = description(lab.region, config, f"touch {tmp_path}/evil", workload_id=launch.workload_id)
    good = hashlib.sha256(launch.model_dump_json().encode()).hexdigest()
    lab.write(changed)
    async with lab.agent(config):
        failure = await (await lab.run(launch, config.machine, sha256=good)).failure()
        assert (failure.type, failure.non_retryable) == ("ChangedLaunch", True)
        lab.write(launch)
        await (await lab.run(launch, config.machine, sha256=good)).result(NodeOutcome)
    assert (tmp_path / "good").exists() and not (tmp_path / "evil").exists()


async def test_a_description_that_is_written_again_changes_nothing(lab: Lab, tmp_path: Path) -> None:
    """A workflow that replaces a lost one may write a different description of the same attempt: its tasks continue.

    Tasks that started or ended with the first description are found again, whatever the new one says.
    """
    config = lab.config()
    launch = description(lab.region, config, f"echo x >> {tmp_path}/runs")
    again = launch.model_copy(update={"stale_tables": {"t": datetime(2026, 1, 1, tzinfo=UTC)}})
    for described in (launch, again):
        lab.write(described)
        async with lab.agent(config):
            sha256 = hashlib.sha256(described.model_dump_json().encode()).hexdigest()
            outcome: NodeOutcome = await (await lab.run(described, config.machine, sha256=sha256)).result(NodeOutcome)
        assert [e.exit_code for e in outcome.exits] == [0] and not outcome.stopped
    assert (tmp_path / "runs").read_text() == "x\n"


@pytest.mark.parametrize("harm", ["no bucket", "no archive", "two files of one path", "a file in the folder's place"])
async def test_whom_a_launch_that_fails_blames(lab: Lab, harm: str) -> None:
    """Each launch failure is reported to the workflow as a type of the closed list, which determines the blame."""
    config = lab.config()
    launch = description(
        lab.region,
        config,
        "true",
        workdir="1" * 64 if harm == "no archive" else None,
        files={"d": "a file", "d/e": "and below it"} if harm == "two files of one path" else {},
    )
    lab.write(launch)
    if harm == "no bucket":
        (lab.folder / "bucket").rename(lab.folder / "away")
    async with lab.agent(config):
        if harm == "a file in the folder's place":
            folder = StateFolder(config.state_dir).path / "runs" / f"{launch.workload_id}.1"
            folder.mkdir()
            (folder / "main.0").write_text("not a folder")
        failure = await (await lab.run(launch, config.machine, attempts=1)).failure()
    wanted = {
        "no bucket": Blame.NOBODY,
        "no archive": Blame.NOBODY,
        "two files of one path": Blame.WORKLOAD,
        "a file in the folder's place": Blame.MACHINE,
    }
    assert failure.type in list(LaunchError)
    assert verdict(failure.type).blame is wanted[harm], failure
