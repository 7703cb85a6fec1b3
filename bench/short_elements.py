"""short-elements: an array of 1,000 elements of `true` on 8 slots, against Slurm's, and one of 10,000.

The stack is that of `end-to-end`, in the default isolation, and the array has runners. Slurm is Debian's, on a node of
8 CPUs on the same computer; the two take turns. Its scheduler has the settings for high throughput in
`bench.slurm_cluster.TUNED`: with Slurm's defaults it looks for the next elements only every 3 s. A time is from the
submission to the end of the last element. Without Slurm, only the second line is measured.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.end_to_end import EndToEndStack
from bench.harness import Bench, Figure, InvalidBenchmark, Line, Suite, interleave, medians
from bench.slurm_cluster import TUNED, slurm_cluster, why_no_slurm
from infra.stack.lock import data_folder
from mizzen_client import Client

ELEMENTS, MORE, SLOTS = 1000, 10_000, 8
_LOOK_S = 0.05


def _document(elements: int) -> dict[str, Any]:
    array = {"indexes": f"0-{elements - 1}", "throttle": SLOTS, "runners": True}
    job = {"name": "main", "resources": {"cpus": 0.1, "memory": "64MiB"}, "run": "true"}
    return {"version": 1, "name": "short", "tenant": "t", "array": array, "jobs": [job]}


def _seconds(stack: EndToEndStack, elements: int) -> float:
    """Returns the seconds that an array takes.

    Raises:
        InvalidBenchmark: an element did not succeed.
    """
    began_s = time.perf_counter()
    with Client(stack.embedded.api_url, stack.embedded.operator_key) as client:
        array = client.submit(_document(elements))["id"]
        while (found := client.workload(array))["finished_at"] is None:
            time.sleep(_LOOK_S)
        took_s = time.perf_counter() - began_s
    if found["array"] is None or found["array"]["succeeded"] != elements:
        raise InvalidBenchmark(f"{found['array']}: not all of {elements} elements succeeded")
    return took_s


def run(bench: Bench) -> Iterator[Figure]:
    """Yields both lines; without Slurm only the second."""
    missing = why_no_slurm()
    with (
        tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as name,
        tempfile.TemporaryDirectory(prefix="slurm-") as slurm_folder,
        data_folder(Path(name)) as folder,
        asyncio.Runner() as runner,
        ExitStack() as others,
    ):
        stack = EndToEndStack(folder)
        try:
            bench.say("starting the stack")
            runner.run(stack.start())
            things: dict[str, Callable[[], float]] = {
                "elements_s": lambda: runner.run(asyncio.to_thread(_seconds, stack, ELEMENTS)),
                "more_s": lambda: runner.run(asyncio.to_thread(_seconds, stack, MORE)),
            }
            if missing is None:
                cluster = others.enter_context(slurm_cluster(Path(slurm_folder), SLOTS, TUNED))
                things["slurm_s"] = lambda: cluster.run_array(ELEMENTS)
            else:
                bench.say(f"without Slurm: {missing}")
            found = medians(interleave(bench, things))
        finally:
            runner.run(stack.stop())
    sizes: dict[str, float | str] = {"elements": ELEMENTS, "more": MORE, "slots": SLOTS}
    if missing is None:
        yield Figure(SUITE.name, SUITE.lines[0], found["elements_s"] / found["slurm_s"], found, bench.rounds, sizes)
    yield Figure(SUITE.name, SUITE.lines[1], found["more_s"] / found["elements_s"], found, bench.rounds, sizes)


SUITE = Suite(
    "short-elements",
    (
        Line("1,000 elements of `true` over Slurm's time", 1.0),
        Line("10,000 elements over 1,000", 11.0),
    ),
    run,
)
