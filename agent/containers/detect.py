"""Finds the container engine of this machine, and checks that it can separate tasks."""

from functools import cache
from pathlib import Path

from agent.containers.engine import EngineError, EngineFacts, open_engine
from infra.errors import ConfigurationError

AUTO, NONE = "auto", "none"
_SOCKETS = ("/run/docker.sock", "/var/run/docker.sock", "/run/podman/podman.sock")


@cache
def find_engine(wanted: str) -> tuple[Path, EngineFacts] | None:
    """Returns socket and facts of the engine that tasks with an image use; None: there is none.

    `wanted` is the setting `tasks.container_engine`: the path of a socket, `auto` (the first of the usual sockets whose
    engine can be used) or `none`.

    Raises:
        ConfigurationError: the engine at a given path cannot be used.
    """
    if wanted == NONE:
        return None
    for path in _SOCKETS if wanted == AUTO else (wanted,):
        if wanted == AUTO and not Path(path).is_socket():
            continue
        try:
            facts = open_engine(path).describe()
            why = facts.why_unusable
        except EngineError as error:
            why = str(error)
        if why is None:
            return Path(path), facts
        if wanted != AUTO:
            raise ConfigurationError(f"tasks.container_engine {path}: {why}")
    return None
