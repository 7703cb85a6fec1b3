"""gms-scan: one pass over 1,000,000 pending workloads of 500 tenants, from columns to the ranked order (MAST 4.2).

The baseline is `numpy.argsort(kind="stable")` of 1,000,000 uniform doubles, which is the cost of sorting alone. The
queue is from `bench.queues`. MAST's Python implementation takes 34 s for 6,000 to 10,000 workloads (section 5.4).
"""

from collections.abc import Iterator

import numpy as np

from bench import queues
from bench.harness import Bench, Figure, Line, Suite, interleave, medians, timed
from gms.columns import QueueColumns
from gms.scan import scan_queue

WORKLOADS, TENANTS = 1_000_000, 500


def run(bench: Bench) -> Iterator[Figure]:
    """Runs the suite, and yields its figure."""
    bench.say(f"generating a queue of {WORKLOADS:,} workloads")
    queue = QueueColumns.of(queues.queue(WORKLOADS, TENANTS))
    doubles = np.random.default_rng(2).random(WORKLOADS)
    scan = scan_queue(queue, queues.NOW_S, queues.WEIGHTS)
    within = float(((scan.pending.rank > 0) & (scan.pending.rank < 8)).sum() / len(scan.order))
    found = medians(
        interleave(
            bench,
            {
                "scan_s": timed(lambda: scan_queue(queue, queues.NOW_S, queues.WEIGHTS)),
                "argsort_s": timed(lambda: np.argsort(doubles, kind="stable")),
            },
        )
    )
    sizes = {"pending": WORKLOADS, "placed": len(queue.placed), "tenants": TENANTS, "within_quota": within}
    yield Figure(SUITE.name, SUITE.lines[0], found["scan_s"] / found["argsort_s"], found, bench.rounds, sizes)


SUITE = Suite("gms-scan", (Line("pass over argsort", 1.5),), run)
