"""simulate: events per second of the simulator, against the same simulator on the reference implementations.

Five regions have 200 machines of 8 GPUs each. Workloads have MAST's quantiles (`research.traces.synthetic`) and request
20 times the supply, so that there are queues and evictions from the start. The policy is `global`. The first events of
both are timed; their events are identical (a test checks this). The scenario is generated before.
"""

from collections.abc import Iterator

from bench.harness import Bench, Figure, Line, Suite, interleave, medians
from research.traces.synthetic import events_per_s, synthetic
from simulation.policies import POLICIES

WORKLOADS, REGIONS, MACHINES, LOAD, EVENTS = 1500, 5, 200, 20.0, 1500


def run(bench: Bench) -> Iterator[Figure]:
    """Runs the suite, and yields its figure."""
    scenario = synthetic(WORKLOADS, regions=REGIONS, machines=MACHINES, load=LOAD)

    def measured(plain: bool) -> float:
        bench.say("on the reference implementations" if plain else "on the columns")
        return 1.0 / events_per_s(scenario, POLICIES["global"], plain, EVENTS)

    found = medians(interleave(bench, {"event_s": lambda: measured(False), "plain_event_s": lambda: measured(True)}))
    sizes = {"workloads": WORKLOADS, "regions": REGIONS, "machines": REGIONS * MACHINES, "events": EVENTS}
    yield Figure(SUITE.name, SUITE.lines[0], found["plain_event_s"] / found["event_s"], found, bench.rounds, sizes)


SUITE = Suite("simulate", (Line("times the events/s", 20, True),), run)
