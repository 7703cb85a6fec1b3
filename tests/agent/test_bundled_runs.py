"""Several attempts in one activity of the agent."""

from domain.protocol.activities import Activity
from domain.protocol.bundles import BundleRun, RunBundle
from domain.protocol.machines import RunNode
from tests.agent.harness import Lab, description, digest


async def test_it_returns_what_has_ended(lab: Lab) -> None:
    """Attempts that have ended are returned, and one that cannot start is named; the others go on and are returned to
    a later request, and nothing is started twice.
    """
    config = lab.config()
    log = lab.folder / "starts"
    launches = [
        description(lab.region, config, f"echo {k} >> {log}; {command}")
        for k, command in enumerate(("exit 0", "exit 4", f"until [ -e {log}.go ]; do sleep 0.05; done"))
    ]
    keys = [lab.write(launch) for launch in launches]
    runs = [
        RunNode(launch.workload_id, 1, config.machine, key, lab.bucket_url, {}, digest(launch), leads_jobs=["main"])
        for launch, key in zip(launches, keys, strict=True)
    ]
    absent = RunNode("wl-absent", 1, config.machine, "launches/absent", lab.bucket_url, {}, "0" * 64, ["main"])
    ids = [launch.workload_id for launch in launches]

    async def run(*asked: RunNode, limit_s: float) -> BundleRun:
        request = RunBundle(config.machine, [*asked], limit_s)
        ran: BundleRun = await (await lab.start(Activity.RUN_BUNDLE, config.machine, request)).result(BundleRun)
        return ran

    async with lab.agent(config):
        ran = await run(*runs, absent, limit_s=30.0)
        assert ran.refused == ["wl-absent"]
        ended = dict(ran.outcomes)
        while len(ended) < 2:
            ended |= (await run(*runs, limit_s=30.0)).outcomes
        assert {one: outcome.succeeded for one, outcome in ended.items()} == {ids[0]: True, ids[1]: False}
        assert await run(runs[2], limit_s=0.3) == BundleRun()
        (lab.folder / "starts.go").touch()
        assert [one.succeeded for one in (await run(runs[2], limit_s=30.0)).outcomes.values()] == [True]
    assert sorted(log.read_text().split()) == ["0", "1", "2"]
