"""A run of faults of a cluster while gangs run on its machines, judged from outside.

It is judged by the journals of the tasks, by what the API says, and by what the cluster lists.
"""

import time
from collections.abc import Callable
from pathlib import Path

from tests.chaos.judge import judge
from tests.chaos.observed import Observed
from tests.clusters.faults import ClusterFaults
from tests.clusters.load import Load
from tests.clusters.site import ClusterSite
from tests.stack.harness import wait_until

EACH = 20
"""The number of faults of each kind in a round."""
EVERY_S = 1.0
PATIENCE_S = 900.0
LEFT = 3
"""Number of machines at the end."""


def run_faults(
    site: ClusterSite, folder: Path, each: int, seed: int, faults_of: Callable[[Path, Observed], ClusterFaults]
) -> dict[str, int]:
    """Injects `each` faults of each kind, then compares what exists with the ledger, and judges the gangs.

    Returns how many machines each instance had that ever had several, one after the other.

    Raises:
        AssertionError: a machine has no owner or exists twice, or something acknowledged was lost.
    """
    began_s, seen = time.monotonic(), Observed()
    load = Load(site.up, folder / "journals", seen, seed, gangs=6)
    (scratch := folder / "scratch").mkdir()
    faults = faults_of(scratch, seen)
    try:
        load.start()
        site.until_ready(1, PATIENCE_S)
        faults.run(each, EVERY_S)
        lasted_s = time.monotonic() - began_s
        load.stop()
        load.finish(PATIENCE_S)
        site.pool(size=LEFT, max_size=None)
        wait_until(
            lambda: len(site.instances()) == LEFT and site.settled(), "the cluster has the ledger's machines", 300
        )
        ever, known = site.ever(), {one["id"] for one in site.instances(gone=True)}
        site.pool(size=0)
        wait_until(lambda: not site.machines() and not site.instances(), "all machines have ended", 300)
        wait_until(lambda: not site.secrets(), "the secrets of all machines are deleted", 300)
    finally:
        faults.close()
        site.close()
    twice = {name: number for name, number in ever.items() if number > 1}
    print(
        f"seed {seed}: {dict(faults.done)} in {lasted_s:.0f} s: {len(seen.phases)} gangs, {len(seen.runs)} task runs,"
        f" {len(known)} instances, {ever.total()} machines, {len(twice)} instances with several"
    )
    assert ever.keys() <= known
    violations = [f"{one.kind}: {one.detail}" for one in judge(seen)]
    assert not violations, "\n".join(violations)
    assert faults.done == dict.fromkeys(faults.kinds, each)
    return twice
