"""The lane of a runner on a machine: what its elements find and leave, repeats of requests, and stops."""

import asyncio
import os
from pathlib import Path

from domain.ids import log_prefix
from domain.isolation import Isolation
from domain.protocol.leases import ElementsRun
from domain.protocol.machines import NodeOutcome
from tests.agent.harness import Lab, read_log, run_elements, runner, until_async

_LOOKS = """
echo "$MIZZEN_ARRAY_INDEX $MIZZEN_ATTEMPT $MIZZEN_WORKLOAD ${MIZZEN_CHECKPOINT_URI-none}"
ls -A . /tmp /var/tmp /dev/shm | grep left || true
echo once >> FOLDER/count.$MIZZEN_ARRAY_INDEX
for place in . /tmp /var/tmp /dev/shm; do touch $place/left; done
(setsid sleep 600 &)
test $MIZZEN_ARRAY_INDEX != 1
"""


async def test_elements_follow_each_other_in_a_sandbox(lab: Lab) -> None:
    """Each element of a chunk runs once, in a place without the files of others, even if the chunk is requested again.

    What they leave running is killed. The runner ends when it gets no more elements.
    """
    config = lab.config(isolation=Isolation.SANDBOX)
    launch = runner(lab, config, _LOOKS)
    array = launch.workload_id.removesuffix("-r0")
    async with lab.agent(config):
        running = await lab.run(launch, config.machine)
        for indexes in ((0, 1, 2), (0, 1, 2), (3,)):
            run: ElementsRun = await (await run_elements(lab, launch, config, *indexes)).result(ElementsRun)
            codes = {one.index: one.exit_code for one in run.results}
            assert codes == dict.fromkeys(indexes, 0) | ({1: 1} if 1 in indexes else {})
            assert not run.is_over
        assert not _sleepers(lab.folder)
        ended = await (await run_elements(lab, launch, config)).result(ElementsRun)
        assert ended.is_over
        outcome: NodeOutcome = await running.result(NodeOutcome)
        assert outcome.exits[0].succeeded
    for index in range(4):
        assert (lab.folder / f"count.{index}").read_text() == "once\n"
        text, complete = read_log(lab.bucket_url, log_prefix(f"{array}-{index}", 1, "main", 0))
        assert complete and text.decode() == f"{index} 1 {array}-{index} none\n"


def _sleepers(folder: Path) -> list[int]:
    mark, found = os.fsencode(folder), []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                if mark in (path / "environ").read_bytes() and (path / "comm").read_text() == "sleep\n":
                    found.append(int(path.name))
            except OSError:
                continue
    return found


async def test_a_stop_lets_the_element_end(lab: Lab) -> None:
    """After a stop, the element that runs may end within half of the grace period, and no other one is started."""
    config = lab.config()
    launch = runner(
        lab, config, "echo begun > FOLDER/begun.$MIZZEN_ARRAY_INDEX; until [ -e FOLDER/go ]; do sleep 0.05; done;"
        " echo > FOLDER/ended.$MIZZEN_ARRAY_INDEX",
    )  # fmt: skip
    async with lab.agent(config):
        running = await lab.run(launch, config.machine)
        chunk = await run_elements(lab, launch, config, 0, 1)
        await until_async(lambda: (lab.folder / "begun.0").exists())
        stopping = asyncio.create_task(lab.stop(launch, config.machine, grace_s=120.0))
        await until_async(lambda: lab.folder_of(launch, config).stop() is not None)
        (lab.folder / "go").touch()
        stopped = await stopping
        run: ElementsRun = await chunk.result(ElementsRun)
        assert run.is_over and [(one.index, one.is_final) for one in stopped.elements] == [(0, True), (1, False)]
        await running.result(NodeOutcome)
    assert (lab.folder / "ended.0").exists() and not (lab.folder / "begun.1").exists()


async def test_a_stop_that_interrupts(lab: Lab) -> None:
    """With `interrupt: now`, the element that runs gets SIGTERM at once, and has not ended by itself."""
    config = lab.config()
    launch = runner(
        lab, config, "trap 'exit 0' TERM; echo > FOLDER/begun; while :; do sleep 0.05; done", interrupt="now"
    )
    async with lab.agent(config):
        running = await lab.run(launch, config.machine)
        chunk = await run_elements(lab, launch, config, 0, 1)
        await until_async(lambda: (lab.folder / "begun").exists())
        stopped = await lab.stop(launch, config.machine, grace_s=20.0)
        assert [(one.index, one.began_s is not None, one.is_final) for one in stopped.elements] == [
            (0, True, False),
            (1, False, False),
        ]
        await chunk.result(ElementsRun)
        await running.result(NodeOutcome)
