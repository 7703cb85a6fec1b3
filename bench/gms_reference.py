"""gms-reference: a scan of 10,000 workloads of 50 tenants on columns, against the reference implementation.

The reference (`reference.queue_scan`) takes and returns plain Python objects. The first line compares it with the pass
over the columns, whose result is sufficient for a tick. In the second line, the pass also creates an object for every
workload, as the reference does. The queue is from `bench.queues`, and both must have the same result.
"""

from collections.abc import Iterator

from bench import queues
from bench.harness import Bench, Figure, InvalidBenchmark, Line, Suite, interleave, medians, timed
from gms.columns import QueueColumns
from gms.scan import scan_queue
from reference import queue_scan

WORKLOADS, TENANTS = 10_000, 50


def run(bench: Bench) -> Iterator[Figure]:
    """Runs the suite, and yields its two figures."""
    snapshot = queues.queue(WORKLOADS, TENANTS)
    queue = QueueColumns.of(snapshot)
    if scan_queue(queue, snapshot.now_s, snapshot.weights).result() != queue_scan.scan(snapshot):
        raise InvalidBenchmark("the results of the columns and of the reference differ")
    found = medians(
        interleave(
            bench,
            {
                "scan_s": timed(lambda: scan_queue(queue, snapshot.now_s, snapshot.weights), 20),
                "reference_s": timed(lambda: queue_scan.scan(snapshot)),
                "values_s": timed(lambda: scan_queue(queue, snapshot.now_s, snapshot.weights).result()),
            },
        )
    )
    sizes = {"pending": WORKLOADS, "placed": len(queue.placed), "tenants": TENANTS}
    for line, name in zip(SUITE.lines, ("scan_s", "values_s"), strict=True):
        absolute = {key: found[key] for key in (name, "reference_s")}
        yield Figure(SUITE.name, line, found["reference_s"] / found[name], absolute, bench.rounds, sizes)


SUITE = Suite("gms-reference", (Line("times faster", 20, True), Line("times faster, as values", None, True)), run)
