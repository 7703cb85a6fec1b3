"""A plain queueing model, second by second: the reference for `research.spot.queue_model`. Times are whole seconds."""

from dataclasses import dataclass


@dataclass
class PlainReplica:
    from_s: int
    to_s: int
    preempted: bool


def plain_serving(
    arrivals: list[tuple[int, int]], replicas: list[PlainReplica], concurrency: int, timeout_s: int
) -> list[tuple[int, str, int]]:
    """Serves (arrival, service time) with replicas sorted by their start.

    Returns for each request its latency, what became of it, and the number of interruptions.
    """
    found: dict[int, tuple[int, str]] = {}
    interrupted = [0] * len(arrivals)
    running: dict[int, tuple[int, int]] = {}  # The replica and the start of each running request.
    for now in range(max((at for at, _ in arrivals), default=0) + timeout_s + 1):
        for request, (_, start) in list(running.items()):
            if now - start == arrivals[request][1]:
                del running[request]
                found[request] = (now - arrivals[request][0], "answered")
        for request, (at, _) in enumerate(arrivals):
            if request not in found and now - at == timeout_s:
                found[request] = (timeout_s, "running" if running.pop(request, None) else "waiting")
        for request, (replica, _) in list(running.items()):
            if replicas[replica].preempted and replicas[replica].to_s == now:
                del running[request]
                interrupted[request] += 1
        for request, (at, service) in enumerate(arrivals):
            if at > now or request in found or request in running:
                continue
            loads = [sum(on == k for on, _ in running.values()) for k in range(len(replicas))]
            open_ = [k for k, one in enumerate(replicas) if one.from_s <= now < one.to_s and loads[k] < concurrency]
            if not open_:
                break
            running[request] = (min(open_, key=lambda k: (loads[k], k)), now)
            assert service > 0
    return [(*found[request], interrupted[request]) for request in range(len(arrivals))]
