"""The SDK for training code: checkpoints, notices, progress reports and the environment of a task.

It needs only the standard library, except `Executor`, which is part of the distribution `mizzen-client`.
Names are imported on first use, so `import mizzen` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mizzen.checkpoint import Checkpointer, CheckpointSettings, open_checkpoints
    from mizzen.client import Executor
    from mizzen.environment import TaskEnvironment, World, world
    from mizzen.notices import exit_preempted, preempted
    from mizzen.report import progress

__version__ = "0.2.0"
__all__ = [
    "CheckpointSettings",
    "Checkpointer",
    "Executor",
    "TaskEnvironment",
    "World",
    "__version__",
    "exit_preempted",
    "open_checkpoints",
    "preempted",
    "progress",
    "world",
]

_HOMES = {
    "CheckpointSettings": "mizzen.checkpoint",
    "Checkpointer": "mizzen.checkpoint",
    "Executor": "mizzen.client",
    "TaskEnvironment": "mizzen.environment",
    "World": "mizzen.environment",
    "exit_preempted": "mizzen.notices",
    "open_checkpoints": "mizzen.checkpoint",
    "preempted": "mizzen.notices",
    "progress": "mizzen.report",
    "world": "mizzen.environment",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mizzen' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
