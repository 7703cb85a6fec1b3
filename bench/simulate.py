"""simulate: events a second of the simulator, against the same simulator on the plain references.

Five regions of 200 machines of 8 GPUs, workloads by MAST's quantiles (`simulation.synthetic`) that ask for 20 times the
supply, so that queues and evictions are there from the start, under the policy `global`. Timed are the first events of
each; both do the same, event by event (a test says so). The scenario is drawn before.
"""

from collections.abc import Iterator

from bench.harness import Bench, Figure, Line, Suite, interleave, medians
from simulation.policies import POLICIES
from simulation.synthetic import events_per_s, synthetic

WORKLOADS, REGIONS, MACHINES, LOAD, EVENTS = 1500, 5, 200, 20.0, 1500


def run(bench: Bench) -> Iterator[Figure]:
    """One figure."""
    scenario = synthetic(WORKLOADS, regions=REGIONS, machines=MACHINES, load=LOAD)

    def measured(plain: bool) -> float:
        bench.say("on the references" if plain else "on the columns")
        return 1.0 / events_per_s(scenario, POLICIES["global"], plain, EVENTS)

    found = medians(interleave(bench, {"event_s": lambda: measured(False), "plain_event_s": lambda: measured(True)}))
    sizes = {"workloads": WORKLOADS, "regions": REGIONS, "machines": REGIONS * MACHINES, "events": EVENTS}
    yield Figure(SUITE.name, SUITE.lines[0], found["plain_event_s"] / found["event_s"], found, bench.rounds, sizes)


SUITE = Suite("simulate", (Line("times the events/s", 20, True),), run)
