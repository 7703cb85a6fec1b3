"""Removes containers that nothing watches any more, because their shim and agent were killed or their folder deleted,
and images that no attempt needs.
"""

import contextlib
import logging
from pathlib import Path

from agent.config import AgentConfig
from agent.containers.engine import FOLDER_LABEL, MACHINE_LABEL, EngineError, open_engine
from agent.containers.image_cleanup import FetchedImages
from agent.record_files import DamagedRecord
from agent.state import StateFolder
from agent.tasks import TaskState, inspect

_log = logging.getLogger(__name__)


def remove_stray(config: AgentConfig, state: StateFolder) -> list[str]:
    """Removes the containers of this machine without a running task, and returns their names.

    Those of tasks whose shim was killed are left to `agent.tasks.end_lost`, and those of a start that is in progress
    to its shim: it holds the lock of the task's folder.
    """
    if config.engine_socket is None:
        return []
    removed = []
    try:
        engine = open_engine(str(config.engine_socket))
        for found in engine.containers({MACHINE_LABEL: config.machine}):
            folder = Path(found.get(FOLDER_LABEL, ""))
            run = next((run for one in state.attempts() for run in one.runs() if run.path == folder), None)
            if run is not None:
                if inspect(run) in (TaskState.RUNNING, TaskState.LOST):
                    continue
                with run.locked() as free:
                    if not free:
                        continue
            engine.remove(found["name"])
            removed.append(found["name"])
    except EngineError as error:
        _log.warning("containers that are left cannot be removed: %s", error)
    return removed


def remove_images(config: AgentConfig, state: StateFolder) -> list[str]:
    """Removes images by age and size (`FetchedImages.remove_old`), and returns their names."""
    if config.engine_socket is None:
        return []
    needed = set[str]()
    for attempt in state.unfinished():
        with contextlib.suppress(DamagedRecord):  # Its tasks are ended.
            launch = attempt.launch()
            needed.update(job.image for job in (launch.jobs.values() if launch else ()) if job.image)
    try:
        engine = open_engine(str(config.engine_socket))
        return FetchedImages(state.images).remove_old(engine, needed, config.keep_images_s, config.images_bytes)
    except EngineError as error:
        _log.warning("images that are not needed cannot be removed: %s", error)
        return []
