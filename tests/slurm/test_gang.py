"""The main path on a real Slurm cluster: a gang waits, pilots start, the gang runs over two nodes, and pilots end."""

from pathlib import Path

import pytest

from tests.slurm.site import site
from tests.stack.harness import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.stack, pytest.mark.timeout(180)]


def test_a_gang_runs_on_pilots(tmp_path: Path) -> None:
    """A pool grows for a gang of three tasks by one job for each machine, and shrinks by cancelling the jobs."""
    with site(tmp_path) as there:
        there.start()
        there.pool(size=0, max_size=4, idle_s=2)
        gate = tmp_path / "gate"
        gang = there.up.submit("gang", 40, 0.1, tasks=3, gate=gate)
        wait_until(lambda: there.up.phase(gang) == "running", "the gang runs")
        jobs = there.slurm.jobs()
        ready = {one["id"]: one for one in there.until_ready(3)}
        assert jobs.keys() == ready.keys()
        assert {name: [one["native_id"]] for name, one in ready.items()} == jobs
        assert {one["ends_at"] is not None for one in ready.values()} == {True}
        assert list((there.slurm.folder / "pilots").glob("*.env")) == []
        gate.touch()
        wait_until(lambda: there.up.ended(gang), "the gang succeeds")
        wait_until(lambda: not there.slurm.jobs(), "all pilots have ended")
        wait_until(lambda: not there.instances(), "all instances are gone")
