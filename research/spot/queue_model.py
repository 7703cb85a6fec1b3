"""The compiled loop of the queueing model; `research.spot.latency` documents the model."""

from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from domain.compiled import compiled

F8 = npt.NDArray[np.float64]
I8 = npt.NDArray[np.int64]
I4 = npt.NDArray[np.int32]
I1 = npt.NDArray[np.int8]
B1 = npt.NDArray[np.bool_]

ANSWERED, FAILED_WAITING, FAILED_RUNNING = 0, 1, 2
"""What became of a request: it was answered, or its timeout ended while it waited or while a replica worked on it."""


@compiled
def serve(
    arrival_s: F8, service_s: F8, from_s: F8, to_s: F8, by_end: I8, preempted: B1, concurrency: int, timeout_s: float
) -> tuple[F8, I1, I4]:
    """Serves requests, which are sorted by arrival, with replicas, which are sorted by the time they become ready.

    Args:
        arrival_s: the arrivals.
        service_s: the service times.
        from_s: when each replica becomes ready.
        to_s: when each replica stops taking requests; after `from_s`.
        by_end: the replicas sorted by `to_s`.
        preempted: whether the running requests of a replica are interrupted at its end.
        concurrency: the number of requests that one replica answers at the same time.
        timeout_s: the time from its arrival after which a request fails.

    Returns the latency of each request (the timeout if it failed), its outcome, and how many times a preemption
    interrupted it.
    """
    requests, replicas = arrival_s.size, from_s.size
    latency_s = np.full(requests, timeout_s)
    outcome = np.full(requests, FAILED_WAITING, np.int8)
    interrupted = np.zeros(requests, np.int32)
    load = np.zeros(replicas, np.int64)
    active = np.empty(replicas, np.int64)
    count = arrived = started = ended = 0
    # The heaps have one entry at first, because the compiler infers their types from it.
    running = [(0.0, 0, 0)]
    running.pop()
    waiting = [0]
    waiting.pop()
    while arrived < requests or len(running) > 0 or len(waiting) > 0:
        now_s = np.inf
        if arrived < requests:
            now_s = min(now_s, arrival_s[arrived])
        if len(running) > 0:
            now_s = min(now_s, running[0][0])
        if started < replicas:
            now_s = min(now_s, from_s[started])
        if ended < replicas:
            now_s = min(now_s, to_s[by_end[ended]])
        if now_s == np.inf:
            break  # No replica will answer the waiting requests.
        while len(running) > 0 and running[0][0] <= now_s:
            end_s, request, replica = heappop(running)
            load[replica] -= 1
            if outcome[request] == ANSWERED:
                latency_s[request] = end_s - arrival_s[request]
        while ended < replicas and to_s[by_end[ended]] <= now_s:
            gone = by_end[ended]
            ended += 1
            kept = 0
            for k in range(count):
                if active[k] != gone:
                    active[kept] = active[k]
                    kept += 1
            count = kept
            if preempted[gone] and load[gone] > 0:
                others = [one for one in running if one[2] != gone]
                for one in running:
                    if one[2] == gone:
                        interrupted[one[1]] += 1
                        outcome[one[1]] = FAILED_WAITING
                        heappush(waiting, one[1])
                running = others
                heapify(running)
                load[gone] = 0
        while started < replicas and from_s[started] <= now_s:
            active[count] = started
            count += 1
            started += 1
        while arrived < requests and arrival_s[arrived] <= now_s:
            heappush(waiting, arrived)
            arrived += 1
        while len(waiting) > 0:
            request = waiting[0]
            deadline_s = arrival_s[request] + timeout_s
            if deadline_s <= now_s:
                heappop(waiting)
                continue
            best = -1
            for k in range(count):
                if load[active[k]] < concurrency and (best < 0 or load[active[k]] < load[best]):
                    best = active[k]
            if best < 0:
                break
            heappop(waiting)
            load[best] += 1
            end_s = now_s + service_s[request]
            outcome[request] = ANSWERED if end_s <= deadline_s else FAILED_RUNNING
            heappush(running, (min(end_s, deadline_s), request, best))
    return latency_s, outcome, interrupted
