"""Pilots, nodes, Slurm's controller and mizzen's processes are killed at random while gangs run on pilots.

Everything is judged from outside: by the journals of the tasks, by what the API says, and by what Slurm lists. `make
test-all` makes one fault of each kind; `make chaos-slurm` makes 200 of each kind, and a longer outage of the
controller. `MIZZEN_CHAOS_ROUNDS` is the number of faults of each kind divided by 20.
"""

import os
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.judge import judge
from tests.chaos.observed import Observed
from tests.slurm.cluster import SlurmCluster, cluster
from tests.slurm.faults import KINDS, SlurmFaults
from tests.slurm.load import Load
from tests.slurm.site import SlurmSite
from tests.stack.harness import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.chaos, pytest.mark.long, pytest.mark.stack, pytest.mark.timeout(18_000)]
ROUNDS = int(os.environ.get("MIZZEN_CHAOS_ROUNDS", "0"))
EACH = 20 * ROUNDS or 1
EVERY_S = 5.0
OUTAGE_S = 300.0 if ROUNDS else 40.0
PATIENCE_S = 900.0
LEFT = 3
"""Number of pilots at the end."""


def _site(slurm: SlurmCluster, folder: Path, size: int) -> SlurmSite:
    made = SlurmSite(slurm, folder, lost_after_s=60)
    made.start()
    made.pool(size=size, max_size=8, idle_s=10, zones=["batch"])
    return made


def _same(there: SlurmSite) -> bool:
    """Returns whether each live instance is ready and has one job, and each pilot job is the one of an instance."""
    phases = {one["phase"] for one in there.instances()}
    return phases <= {"ready"} and {name: [job] for name, job in _jobs(there).items()} == there.slurm.jobs()


def _jobs(there: SlurmSite) -> dict[str, str]:
    """Returns the number of the job of each live instance."""
    return {one["id"]: (one["native_id"] or "").partition(".")[0] for one in there.instances()}


def test_kills(tmp_path: Path) -> None:
    """After all faults, all gangs have ended as their tasks did, and Slurm has the pilots of the ledger, each once."""
    seen = Observed()
    with cluster(4, grace_s=5, min_job_age_s=100_000) as slurm:
        there = _site(slurm, tmp_path / "site", 0)
        load = Load(there.up, tmp_path / "journals", seen, EACH, gangs=6)
        (scratch := tmp_path / "scratch").mkdir()
        faults = SlurmFaults(slurm, there.up, scratch, seen, EACH)
        try:
            load.start()
            faults.run(EACH, EVERY_S)
            load.stop()
            load.finish(PATIENCE_S)
            there.pool(size=LEFT, max_size=None)
            wait_until(lambda: len(there.instances()) == LEFT and _same(there), "Slurm has the ledger's pilots", 300)
            listed = slurm.command("squeue", "-h", "-t", "all", "-o", "%j").splitlines()
            known = {one["id"] for one in there.instances(gone=True)}
            there.pool(size=0)
            wait_until(lambda: not slurm.jobs() and not there.instances(), "all pilots have ended", 300)
            left = (slurm.folder / "pilots").glob
            wait_until(lambda: not list(left("*.env")), "the secrets of forgotten jobs are deleted", 300)
        finally:
            faults.close()
            there.close()
    names = Counter(name for name in listed if name.startswith("in-"))
    print(
        f"{dict(faults.done)}: {len(seen.phases)} gangs, {len(seen.runs)} task runs, {len(known)} instances,", end=" "
    )
    print(f"{names.total()} jobs in Slurm's list, {sum(n - 1 for n in names.values())} second ones")
    assert names.keys() <= known
    violations = [f"{one.kind}: {one.detail}" for one in judge(seen)]
    assert not violations, "\n".join(violations)
    assert faults.done == dict.fromkeys(KINDS, EACH)


def test_the_controller_is_away_under_load(tmp_path: Path) -> None:
    """While slurmctld is dead for minutes, gangs run on, and no instance is lost; nothing is started twice."""
    seen = Observed()
    with cluster(4, min_job_age_s=100_000) as slurm:
        there = _site(slurm, tmp_path / "site", 4)
        load = Load(there.up, tmp_path / "journals", seen, 1, gangs=6)
        try:
            there.until_ready(4)
            load.start()
            wait_until(lambda: any(one["phase"] == "running" for one in there.up.client().workloads()), "gangs run")
            before, ended = {name: job for name, job in _jobs(there).items() if job}, _succeeded(there)
            slurm.kill("slurmctld")
            began_s = time.monotonic()
            while time.monotonic() - began_s < OUTAGE_S:
                assert before.keys() <= {one["id"] for one in there.instances()}, "an instance was lost"
                time.sleep(2)
            meanwhile = _succeeded(there) - ended
            slurm.start_controller()
            slurm.until(lambda: slurm.jobs(), "the controller answers")
            kept = {name: jobs[0] for name, jobs in slurm.jobs().items()}
            load.stop()
            load.finish(PATIENCE_S)
            wait_until(lambda: _same(there), "Slurm has the ledger's pilots", 120)
            attempts = Counter(int(one["attempt"]) for one in there.up.client().workloads())
            names = Counter(slurm.command("squeue", "-h", "-t", "all", "-o", "%j").splitlines())
        finally:
            there.close()
    print(f"{OUTAGE_S:.0f} s without a controller: {meanwhile} gangs ended, {len(seen.phases)} in all")
    assert meanwhile > 0
    assert before.items() <= kept.items()
    assert attempts.keys() == {1}
    assert set(names.values()) == {1}
    violations = [f"{one.kind}: {one.detail}" for one in judge(seen)]
    assert not violations, "\n".join(violations)


def _succeeded(there: SlurmSite) -> int:
    return sum(one["phase"] == "succeeded" for one in there.up.client().workloads())
