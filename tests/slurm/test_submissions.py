"""Pilots are submitted once, whatever happens to the answers of Slurm."""

import contextlib
import os
import random
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from capacity.ledger_audit import LedgerEntry, compare
from capacity.offers import Offer
from capacity.provider import FoundMachine, LaunchRefused, LaunchRequest, ProviderUnavailable, Refusal
from capacity.providers.slurm import SlurmProvider
from domain import agent_exits
from domain.ids import new_instance_id
from tests.capacity.requests import request_for
from tests.clusters.proxy import losing
from tests.slurm.bench import TRANSPORTS, provider_on
from tests.slurm.cluster import SlurmCluster, cluster, rest_missing

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(900)]
SUBMISSIONS = 200
_WRAPPER = """#!/bin/sh
# By chance: nothing is submitted, the answer is lost, the answer is nonsense, or all is well.
script=$(mktemp -p {folder})
cat > "$script"
case $(($(od -An -N1 -tu1 /dev/urandom) % 4)) in
    0) echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1 ;;
    1) {sbatch} "$@" < "$script" > /dev/null 2>&1; exec kill -9 $$ ;;
    2) {sbatch} "$@" < "$script" > /dev/null; echo 'Submitted something' ;;
    *) exec {sbatch} "$@" < "$script" ;;
esac
"""


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """How the provider reaches Slurm."""
    if request.param == "rest" and (why := rest_missing()) is not None:
        pytest.skip(why)
    return str(request.param)


@contextlib.contextmanager
def _cluster(transport: str, nodes: int, **options: Any) -> Iterator[tuple[SlurmCluster, SlurmProvider]]:
    with cluster(nodes, rest=transport == "rest", **options) as slurm:
        yield slurm, provider_on(slurm, transport)


@contextlib.contextmanager
def _losing(slurm: SlurmCluster, transport: str, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[SlurmProvider]:
    """Yields a provider of whose submissions three in four fail in some way."""
    if transport == "rest":
        url, slash, path = slurm.rest["url"].partition("/slurm/")
        with losing(url, 1) as proxy:
            yield provider_on(slurm, "commands", rest={**slurm.rest, "url": proxy + slash + path})
        return
    (wrapper := folder / "sbatch").write_text(_WRAPPER.format(sbatch="/usr/bin/sbatch", folder=folder))
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    patch.setenv("PATH", f"{folder}:{slurm.environ['PATH']}")
    yield provider_on(slurm, "commands")


def _launched(provider: SlurmProvider, request: LaunchRequest) -> str:
    """Launches as an instance's workflow does: again after each unknown outcome."""
    while True:
        try:
            return provider.launch(request)
        except ProviderUnavailable:
            time.sleep(0.2)


def _offer(provider: SlurmProvider) -> Offer:
    return next(offer for offer in provider.offers() if offer.zone == "batch")


@pytest.mark.parametrize("kills", [False, True], ids=["lost answers", "lost answers and crashes"])
def test_lost_answers_submit_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, *, kills: bool
) -> None:
    """Of 200 submissions of which three in four fail in some way, each gives one job, and its number is known.

    A controller that is killed forgets jobs of the last seconds, gives their numbers to others, and accepts a job twice
    that sbatch sends again. The comparison with the ledger then finds the lost ones, and ends second ones.
    """
    with (
        cluster(1, rest=transport == "rest") as slurm,
        _losing(slurm, transport, tmp_path, monkeypatch) as provider,
    ):
        requests = [request_for(_offer(provider)) for _ in range(SUBMISSIONS)]
        with ThreadPoolExecutor(4) as threads:
            launching = [threads.submit(_launched, provider, request) for request in requests]
            chance = random.Random(1)
            while not all(one.done() for one in launching):
                time.sleep(5 + 5 * chance.random())
                if kills:
                    slurm.kill("slurmctld")
                    time.sleep(1)
                    slurm.start_controller()
        slurm.until(lambda: slurm.jobs(), "the controller answers")
        ledger = {request.instance: one.result() for request, one in zip(requests, launching, strict=True)}
        entries = {instance: LedgerEntry(native_id, 0.0) for instance, native_id in ledger.items()}
        found = compare(entries, provider.describe(), time.time(), 0.0)
        assert found.strays == {}
        if not kills:
            assert (found.seconds, found.missing) == ({}, [])
        for native_id in found.seconds:
            provider.terminate(native_id)
        kept = {instance: native_id for instance, native_id in ledger.items() if instance not in found.missing}
        slurm.until(lambda: _live(provider) == kept, "each job is in the ledger, and no instance has two")


def _live(provider: SlurmProvider) -> dict[str, str]:
    """Returns the job of each instance.

    Raises:
        AssertionError: an instance has two.
    """
    there = [one for one in provider.describe() if one.ended is None]
    found = {one.instance: one.native_id for one in there}
    assert len(found) == len(there)
    return found


def test_a_late_submission_is_seen_as_a_second_machine(tmp_path: Path, transport: str) -> None:
    """If a submission reaches the controller after it was repeated, the list has both jobs, and the later one ends."""
    with _cluster(transport, 1) as (slurm, provider):
        request = request_for(_offer(provider))
        first = provider.launch(request)
        secrets = slurm.folder / "pilots" / f"hpc.0123456789abcdef.{request.instance}.env"
        late = slurm.command(
            "sbatch", "--parsable", f"--job-name={request.instance}", "--comment=mizzen:0123456789abcdef", "--time=2",
            "--mem=10M", f"--output={tmp_path}/late", f"--wrap=. {secrets}",
        )  # fmt: skip
        late = f"{late}.{request.instance}"
        slurm.until(lambda: _of(provider, late).ended is not None, "the late job has ended: its secrets are gone")
        assert _of(provider, late).instance == request.instance
        assert _of(provider, first).ended is None
        assert provider.launch(request) == first


def test_secrets_of_forgotten_jobs_are_deleted(transport: str) -> None:
    """A controller that crashed may forget a job. Its secrets go after a while; those of jobs that wait stay.

    So do those of other providers, and of other installations with the same settings.
    """
    with _cluster(transport, 1) as (slurm, provider):
        running, waits, forgotten = request_for(_offer(provider)), request_for(_offer(provider)), new_instance_id()
        provider.launch(running)
        slurm.until(lambda: not list((slurm.folder / "pilots").glob("*.env")), "the first one has started")
        slurm.command("scontrol", "update", "nodename=n1", "state=drain", "reason=full")
        provider.launch(waits)
        folder = slurm.folder / "pilots"
        own, others = "hpc.0123456789abcdef", ("other.0123456789abcdef", "hpc.fedcba9876543210")
        there = [f"{own}.{waits.instance}", *(f"{other}.{forgotten}" for other in others)]
        for name in (f"{own}.{forgotten}", *there):
            (folder / f"{name}.env").touch()
            os.utime(folder / f"{name}.env", (0, 0))
        under_way = new_instance_id()
        (folder / f"{own}.{under_way}.env").touch()
        provider.describe()
        left = {file.name.removesuffix(".env") for file in folder.glob("*.env")}
        assert left == {*there, f"{own}.{under_way}"}


def _number(native_id: str) -> str:
    return native_id.partition(".")[0]


def _of(provider: SlurmProvider, job: str) -> FoundMachine:
    return next(one for one in provider.describe() if one.native_id == job)


def test_ends_have_their_reason(transport: str) -> None:
    """What an administrator, a user, another partition or a node does to a job is told with its reason."""
    with _cluster(transport, 2, grace_s=2) as (slurm, provider):
        cancelled, preempted, drained, failed = (provider.launch(request_for(_offer(provider))) for _ in range(4))
        waits = provider.launch(request_for(_offer(provider)))
        slurm.until(lambda: _of(provider, failed).waits is None, "four jobs run")
        assert "pending" in (_of(provider, waits).waits or "")
        slurm.until(lambda: _of(provider, waits).starts_at_s is not None, "the start of the fifth job is expected")
        ends_at_s = _of(provider, drained).ends_at_s
        assert ends_at_s is not None
        assert 13_000 < ends_at_s - time.time() < 14_460
        slurm.command("scontrol", "update", f"jobid={_number(drained)}", "timelimit=10")
        assert (_of(provider, drained).ends_at_s or 0) - time.time() < 601
        slurm.command("scontrol", "hold", _number(waits))
        slurm.until(lambda: "JobHeld" in (_of(provider, waits).waits or ""), "a held job says so")
        slurm.command("scancel", _number(cancelled))
        slurm.until(lambda: "scancel" in (_of(provider, cancelled).ended or ""), "a cancelled job says so")
        slurm.command(
            "sbatch",
            "--partition=urgent",
            "--nodes=2",
            "--exclusive",
            "--time=1",
            "--output=/dev/null",
            "--wrap=sleep 1",
        )
        slurm.until(lambda: _of(provider, preempted).ended is not None, "a job is preempted")
        assert "preempted" in (_of(provider, preempted).ended or "")


def test_nodes_that_are_drained_or_fail(transport: str) -> None:
    """A node that is drained or marked as failing is to be left, with the reason; a node that is down ends its job."""
    with _cluster(transport, 2) as (slurm, provider):
        launched = [provider.launch(request_for(_offer(provider))) for _ in range(4)]
        first = launched[0]
        slurm.until(lambda: len([one for one in provider.describe() if one.waits is None]) == 4, "four jobs run")
        on = dict(line.split() for line in slurm.command("squeue", "-h", "-o", "%i %N").splitlines())
        node = on[_number(first)]
        other = next(job for job in launched if on[_number(job)] != node)
        slurm.command("scontrol", "update", f"nodename={node}", "state=drain", "reason=fix its fan")
        slurm.until(lambda: "fix its fan" in (_of(provider, first).leaves or ""), "the node is to be left")
        assert _of(provider, other).leaves is None
        slurm.command("scontrol", "update", f"nodename={on[_number(other)]}", "state=fail", "reason=bad memory")
        slurm.until(lambda: "bad memory" in (_of(provider, other).leaves or ""), "the failing node is to be left")
        slurm.kill(on[_number(other)])
        slurm.command("scontrol", "update", f"nodename={on[_number(other)]}", "state=down", "reason=broken")
        words = [f"node {on[_number(other)]} has failed"]
        if transport == "rest":  # slurmrestd of 22.05 ignores that the job must not be requeued.
            words.append(agent_exits.SAID[agent_exits.RESTARTED])
        slurm.until(lambda: _of(provider, other).ended in words, "the job ended with its node")


def test_what_a_node_lacks(transport: str) -> None:
    """Where nodes do not share the folder of the pilots, or have no agent, the reasons of the ends say so."""
    with cluster(1, rest=transport == "rest") as slurm:
        (home := slurm.folder / "home").mkdir()
        (folder := home / "pilots").mkdir()
        no_secrets = agent_exits.SAID[agent_exits.NO_SECRETS]
        for without, agent, words in (
            (folder, "sleep 600 #", no_secrets),
            (home, "sleep 600 #", ("node n1 could not start the job", no_secrets)),  # 24.11 makes the log's folder.
            (None, "/nowhere/mizzen agent", agent_exits.SAID[agent_exits.NOT_FOUND]),
            (None, "sh -c 'exit 3' #", "its agent ended with exit status 3 (NonZeroExitCode); its log is in-"),
        ):
            slurm.kill("n1")
            slurm.start_node("n1", without)
            slurm.until(lambda: slurm.states()["n1"] == "idle", "the node is idle")
            provider = provider_on(slurm, transport, folder=str(folder), agent=agent)
            job = provider.launch(request_for(_offer(provider)))
            slurm.until(lambda: _of(provider, job).ended is not None, "the job has ended")  # noqa: B023
            assert (_of(provider, job).ended or "").startswith(words)


def test_a_job_that_slurm_starts_again_ends(transport: str) -> None:
    """A pilot that a site requeues exits at once, and says so."""
    with _cluster(transport, 1) as (slurm, provider):
        job = provider.launch(request_for(_offer(provider), new_instance_id()))
        # Slurm shows a job as running before its script does; one that is requeued until then fails instead.
        slurm.until(lambda: not list((slurm.folder / "pilots").glob("*.env")), "the script runs")
        slurm.command("scontrol", "update", f"jobid={_number(job)}", "requeue=1")
        slurm.command("scontrol", "requeue", _number(job))
        slurm.until(lambda: "again" in (_of(provider, job).ended or ""), "the machine has ended")
        # Slurm would wait two minutes. For two seconds, 24.11's nodes refuse each start of a job that they have killed.
        time.sleep(2.5)
        slurm.command("scontrol", "update", f"jobid={_number(job)}", "starttime=now")
        slurm.until(lambda: not slurm.jobs(), "the job ended", 200.0)
        assert f"ExitCode={agent_exits.RESTARTED}:0" in slurm.command("scontrol", "show", "job", _number(job))
        assert "again" in (_of(provider, job).ended or "")


def test_the_hint_may_come_before_the_agent_listens(tmp_path: Path) -> None:
    """A pilot that gets the signal of `--signal` while its agent starts goes on: of a short job, it comes at once."""
    with _cluster("commands", 1) as (slurm, _):
        provider = provider_on(slurm, "commands", prepare=f"touch {tmp_path}/starts; sleep 1", agent="sleep 600 #")
        job = provider.launch(request_for(_offer(provider)))
        slurm.until((tmp_path / "starts").exists, "the script runs")
        slurm.command("scancel", "--batch", "--signal=USR1", _number(job))
        time.sleep(3)
        assert _of(provider, job).ended is None


def test_a_wrong_request_and_a_wrong_token(transport: str) -> None:
    """A partition that does not exist is a wrong request; one that an administrator has closed has no capacity now.

    A token that is not valid says nothing about a launch.
    """
    with _cluster(transport, 1) as (slurm, provider):
        wrong = provider_on(slurm, transport, partitions={"batch": {"partition": "nowhere"}})
        with pytest.raises(LaunchRefused, match="Invalid partition name") as raised:
            wrong.launch(request_for(_offer(wrong)))
        assert raised.value.refusal is Refusal.REQUEST
        large = provider_on(slurm, transport, machine_types={"large": {"cpus": 1, "memory": "8TiB"}})
        with pytest.raises(LaunchRefused, match="node configuration is not available"):
            large.launch(request_for(_offer(large)))
        assert not list((slurm.folder / "pilots").glob("*.env")), "the secrets of a refused job are left"
        slurm.command("scontrol", "update", "partitionname=batch", "state=inactive")
        with pytest.raises(LaunchRefused, match="not available") as raised:
            provider.launch(request_for(_offer(provider)))
        assert raised.value.refusal is Refusal.CAPACITY
        slurm.command("scontrol", "update", "partitionname=batch", "state=up")
        if transport == "rest":
            Path(slurm.rest["token_file"]).write_text("x.y.z")
            for request in (provider.describe, lambda: provider.launch(request_for(_offer(provider)))):
                with pytest.raises(ProviderUnavailable):
                    request()
