"""Pilots, nodes, Slurm's controller and mizzen's processes are killed at random while gangs run on pilots.

`make test-all` makes one fault of each kind; `make chaos-slurm` makes 200 of each kind in ten rounds, and a longer
outage of the controller. `MIZZEN_CHAOS_ROUNDS` is the number of rounds.
"""

import os
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.judge import judge
from tests.chaos.observed import Observed
from tests.clusters.kills import EACH, PATIENCE_S, run_faults
from tests.clusters.load import Load
from tests.slurm.cluster import SlurmCluster, cluster
from tests.slurm.faults import SlurmFaults
from tests.slurm.site import SlurmSite
from tests.stack.harness import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.chaos, pytest.mark.long, pytest.mark.stack, pytest.mark.timeout(3600)]
ROUNDS = int(os.environ.get("MIZZEN_CHAOS_ROUNDS", "0"))
OUTAGE_S = 300.0 if ROUNDS else 40.0


def _site(slurm: SlurmCluster, folder: Path, size: int) -> SlurmSite:
    made = SlurmSite(slurm, folder, lost_after_s=60)
    made.start()
    made.pool(size=size, max_size=8, idle_s=10, zones=["batch"])
    return made


@pytest.mark.parametrize("seed", range(1, max(1, ROUNDS) + 1))
def test_kills(tmp_path: Path, seed: int) -> None:
    """After all faults, all gangs have ended as their tasks did, and Slurm has the pilots of the ledger, each once."""
    with cluster(4, grace_s=5, min_job_age_s=100_000) as slurm:
        there = _site(slurm, tmp_path / "site", 0)
        run_faults(
            there, tmp_path, EACH if ROUNDS else 1, seed,
            lambda scratch, seen: SlurmFaults(slurm, there.up, scratch, seen, seed),
        )  # fmt: skip


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
            before, ended = there.ids(), _succeeded(there)
            slurm.kill_saved_controller()
            began_s = time.monotonic()
            while time.monotonic() - began_s < OUTAGE_S:
                assert before.keys() <= {one["id"] for one in there.instances()}, "an instance was lost"
                time.sleep(2)
            meanwhile = _succeeded(there) - ended
            slurm.start_controller()
            slurm.until(lambda: slurm.jobs(), "the controller answers")
            kept = there.machines()
            load.stop()
            load.finish(PATIENCE_S)
            wait_until(there.settled, "Slurm has the ledger's pilots", 120)
            attempts = Counter(int(one["attempt"]) for one in there.up.client().workloads())
            names = there.ever()
        finally:
            there.close()
    print(f"{OUTAGE_S:.0f} s without a controller: {meanwhile} gangs ended, {len(seen.phases)} in all")
    assert meanwhile > 0
    assert set(before.values()) <= set(kept)
    assert attempts.keys() == {1}
    assert set(names.values()) == {1}
    violations = [f"{one.kind}: {one.detail}" for one in judge(seen)]
    assert not violations, "\n".join(violations)


def _succeeded(there: SlurmSite) -> int:
    return sum(one["phase"] == "succeeded" for one in there.up.client().workloads())
