"""Removes folders of old attempts, stored outcomes and records of stops from the machine."""

import asyncio
import logging
import shutil

from agent import tasks
from agent.config import AgentConfig
from agent.containers.leftovers import remove_images, remove_stray
from agent.lending.lender import Lender
from agent.logs import shipped
from agent.memory_servers import MemoryServers
from agent.outcomes import forget_outcomes, keep_outcome
from agent.output_storage import has_outputs
from agent.shared_memory import remove_left
from agent.state import AttemptFolder, StateFolder
from agent.tasks import TaskState

_ABANDONED_S = 86400.0
"""Age at which the folder of a prepared attempt is removed, if the attempt was never started."""
_log = logging.getLogger(__name__)


async def tidy_periodically(config: AgentConfig, state: StateFolder, lender: Lender, memory: MemoryServers) -> None:
    """Periodically removes the folders of old attempts, old outcomes and records of stops, and left shared memory.

    Ends memory servers that are not needed any more.
    """
    while True:
        await asyncio.to_thread(remove_stray, config, state)
        await asyncio.sleep(max(1.0, min(60.0, config.keep_runs_s)))
        try:
            await asyncio.to_thread(remove_images, config, state)
            await asyncio.to_thread(tidy, state, config, is_owners=lender.lending.is_whole)
            await asyncio.to_thread(memory.tidy)
            await asyncio.to_thread(forget_outcomes, state, config.keep_outcomes_s)
            await asyncio.to_thread(state.forget_stopped, config.keep_stopped_s)
            if config.tenant_uids is not None:
                first, count = config.tenant_uids
                await asyncio.to_thread(remove_left, range(first, first + count))
        except OSError as error:
            _log.warning("%s: old run folders could not be removed: %s", config.machine, error)


def tidy(state: StateFolder, config: AgentConfig, *, is_owners: bool = False) -> list[str]:
    """Removes the folders of attempts that have ended, are fully shipped and are no longer kept (`AgentConfig.kept_s`).

    A document's `keep` applies to the last attempt of a workload on this machine, as long as enough of the disk is free
    and the machine is not its owner's (`is_owners`). Stores the outcome of each attempt's tasks on the machine first.
    If outputs cannot be uploaded, the folder is kept for at most `AgentConfig.keep_at_most_s`.
    Also removes temporary folders that killed shims have left (`StateFolder.clear_private`).
    Returns the keys (`workload.attempt`) of the removed attempts.
    """
    removed = []
    state.clear_private()
    attempts = state.attempts()
    last = {attempt.workload_id: attempt.attempt for attempt in attempts}  # They are sorted by number.
    aged = [(attempt.age_s(), attempt) for attempt in attempts]
    for age_s, attempt in sorted(aged, key=lambda pair: -pair[0]):
        if age_s <= config.keep_runs_s:
            continue
        is_last = last[attempt.workload_id] == attempt.attempt and not is_owners
        if is_last and age_s <= _kept_s(config, attempt):
            usage = shutil.disk_usage(state.path)
            if usage.free >= config.keep_free * usage.total:
                continue
        kept_back = any(tasks.inspect(run) is not TaskState.ABSENT and not shipped(run) for run in attempt.runs())
        kept_back = kept_back or bool(attempt.elements())
        kept_back = kept_back or (not is_owners and age_s <= config.keep_at_most_s and has_outputs(attempt))
        over = state.is_over(attempt) or (age_s > _ABANDONED_S and not state.is_started(attempt))
        if over and not kept_back:
            # Without the folder a late retry would start the tasks again, so the attempt is refused from now on.
            keep_outcome(state, attempt, config.machine)
            state.stop_attempts(attempt.workload_id, attempt.attempt)
            state.remove(attempt)
            removed.append(attempt.key)
    return removed


def _kept_s(config: AgentConfig, attempt: AttemptFolder) -> float:
    try:
        return config.kept_s(attempt.launch())
    except (OSError, ValueError):  # Without a readable description, the folder is not kept.
        return config.kept_s(None)
