"""The agent's side of a runner's lease: waits while its shim runs a chunk of array elements."""

import asyncio
import time
from collections.abc import Callable

from temporalio import activity

from agent.element_chunks import ElementChunk
from agent.heartbeats import pause_s
from agent.staged import StagedAttempt
from domain.protocol.leases import ElementsRun

_SHORT_S, _SHIP_S = 0.02, 0.5
"""Shortest interval between checks of a chunk, and the interval between checks of its output."""


async def run_chunk(
    chunk: ElementChunk,
    load: Callable[[], StagedAttempt | None],
    ship: Callable[[StagedAttempt], None],
    *,
    beat_s: float,
    poll_interval_s: float,
) -> ElementsRun:
    """Gives the elements to the runner once it runs, and waits until they or its attempt have ended.

    Args:
        chunk: the leased elements.
        load: returns the staged attempt of the runner, or None while it is not staged; it may block.
        ship: ships the output of the elements.
        beat_s: the interval of heartbeats, which contain the results so far.
        poll_interval_s: the longest interval between checks.
    """
    began_s = next_beat_s = shipped_s = time.monotonic()
    staged: StagedAttempt | None = None
    while not chunk.is_over():
        staged = staged or await asyncio.to_thread(load)
        if staged is not None and await asyncio.to_thread(chunk.hand_over, staged):
            if chunk.is_done():
                break
            if time.monotonic() - shipped_s > _SHIP_S:
                ship(staged)
                shipped_s = time.monotonic()
        if time.monotonic() >= next_beat_s:
            activity.heartbeat(ElementsRun(chunk.results()))
            next_beat_s = time.monotonic() + pause_s(beat_s)
        await asyncio.sleep(max(_SHORT_S, min(poll_interval_s, (time.monotonic() - began_s) / 20)))
    if (staged := staged or await asyncio.to_thread(load)) is not None:
        ship(staged)
    return ElementsRun(chunk.results(), chunk.is_over())
