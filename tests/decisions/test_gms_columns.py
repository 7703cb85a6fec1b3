"""The queue's columns: changes in any order give the same queue as a snapshot."""

from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domain.scheduling import PlacedWorkload, QueuedWorkload, QueueSnapshot
from gms.columns import QueueChange, QueueColumns
from gms.queue_order import order_queue
from gms.scan import scan_queue
from reference import queue_scan as reference
from tests.depth import examples

from . import PROPERTY
from .queues import queued, snapshots, tenant


@dataclass
class _Life:
    """The workloads of a changing queue, and the columns that receive the changes."""

    queue: QueueColumns = field(default_factory=QueueColumns)
    pending: dict[str, QueuedWorkload] = field(default_factory=dict)
    placed: dict[str, PlacedWorkload] = field(default_factory=dict)

    def step(self, drawn: QueueSnapshot, rng: Random) -> None:
        """Adds or replaces a snapshot's workloads, and removes some of the existing ones."""
        gone = [w for w in self.pending.values() if rng.random() < 0.3]
        ended = [w for w in self.placed.values() if rng.random() < 0.3]
        pending = [QueueChange[QueuedWorkload](w.submitted_at_s, w.id, None) for w in gone]
        placed = [QueueChange[PlacedWorkload](w.awarded_at_s, w.id, None) for w in ended]
        for old in gone:
            del self.pending[old.id]
        for was in ended:
            del self.placed[was.id]
        for new in drawn.pending:
            # The submission time of a workload never changes, so a change finds its row.
            now = replace(new, submitted_at_s=self.pending.get(new.id, new).submitted_at_s)
            pending.append(QueueChange(now.submitted_at_s, now.id, now))
            self.pending[now.id] = now
        for holder in drawn.placed:
            held = replace(holder, awarded_at_s=self.placed.get(holder.id, holder).awarded_at_s)
            placed.append(QueueChange(held.awarded_at_s, held.id, held))
            self.placed[held.id] = held
        self.queue.apply(pending, placed)


@settings(PROPERTY, max_examples=examples(150))
@given(st.lists(snapshots(), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_changes_lead_where_a_snapshot_does(steps: list[QueueSnapshot], rng: Random) -> None:
    """After any changes, in batches of any size, a scan of the columns equals the reference's scan."""
    life = _Life()
    tenants = {t.name: t for snapshot in steps for t in snapshot.tenants}
    life.queue.set_tenants(tenants.values())
    for drawn in steps:
        life.step(drawn, rng)
        now = QueueSnapshot(
            1000.0, tuple(tenants.values()), tuple(life.pending.values()), tuple(life.placed.values()), drawn.weights
        )
        assert scan_queue(life.queue, now.now_s, now.weights).result() == reference.scan(now)


@settings(PROPERTY, max_examples=examples(200))
@given(
    st.lists(
        st.tuples(st.integers(0, 8), st.sampled_from([0.0, 1.0, 1.0 + 2**-52, 3.0, -7.5, 1e300, 5e-324])), max_size=300
    )
)
def test_the_order_is_that_of_a_sort(rows: list[tuple[int, float]]) -> None:
    """The bucketed order equals a stable sort by rank and credit, for any distribution of credits."""
    rank, credit = np.array([r for r, _ in rows], np.int8), np.array([c for _, c in rows], np.float64)
    expected = sorted((i for i, (r, _) in enumerate(rows) if r), key=lambda i: (rows[i][0], -rows[i][1]))
    assert order_queue(rank, credit).tolist() == expected


def test_a_tenant_with_workloads_cannot_be_forgotten() -> None:
    """Tenants can be replaced, and removed if they have no workloads; otherwise the removal is an error."""
    queue = QueueColumns()
    queue.set_tenants([tenant("a"), tenant("b")])
    workload = queued("w", of="b")
    queue.apply([QueueChange(workload.submitted_at_s, workload.id, workload)], [])
    queue.set_tenants([tenant("b", level=1)])
    with pytest.raises(ValueError, match="tenants b still have workloads"):
        queue.set_tenants([tenant("a")])
