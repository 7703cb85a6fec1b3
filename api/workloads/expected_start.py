"""The expected start of a waiting workload, read from the queue that the last scan published."""

import time
from datetime import UTC, datetime

from api.workloads.reasons import Row
from api.workloads.views import StartView
from infra.db.published_queue import QueuePosition

_UNITS = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def start_view(row: Row, entry: QueuePosition | None) -> StartView | None:
    """Returns when a workload is expected to start; None: it does not wait in the queue, or there is no forecast."""
    if entry is None or entry.start_s is None or row.held_by is not None or row.blocked is not None:
        return None
    earliest, latest = (datetime.fromtimestamp(at_s, UTC) for at_s in entry.start_s)
    return StartView(earliest=earliest, latest=latest, sentence=_sentence(entry, entry.start_s, time.time()))


def _sentence(entry: QueuePosition, start_s: tuple[float, float], now_s: float) -> str:
    first_s, last_s = (max(0.0, at_s - now_s) for at_s in start_s)
    unit_s, unit = next(((size_s, name) for size_s, name in _UNITS if last_s >= 2 * size_s), _UNITS[-1])
    first, last = round(first_s / unit_s), max(1, round(last_s / unit_s))
    interval = f"in {first} to {last} {unit}" if 0 < first < last else f"within {last} {unit}"
    ahead = entry.position - 1
    ahead_of_it = f"{ahead} workload{'' if ahead == 1 else 's'} ahead of it and for slots" if ahead else "slots"
    moves = ["quota of its tenant"] if entry.over_quota else ["a higher level"] if entry.rank > 1 else []
    moved_by = " or ".join([*moves, "fewer GPUs"])
    return f"{interval} (80 %); it waits for {ahead_of_it} that running work holds; {moved_by} would change the time"
