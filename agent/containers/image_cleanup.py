"""Removes images that the agent has fetched and that no task has needed for long. Other images are left alone."""

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Collection, Iterator
from http.client import CONFLICT
from pathlib import Path
from typing import NamedTuple

from agent.containers.engine import ContainerEngine, EngineError
from agent.records import write_durably

_log = logging.getLogger(__name__)


class FetchedImage(NamedTuple):
    """An image that the agent has fetched."""

    used_at_s: float
    """When an attempt last needed it, in seconds since the epoch."""
    name: str
    size_bytes: int
    """With the layers that it shares with other images."""
    record: Path


class FetchedImages:
    """The records of these images: one file each, whose modification time is that of the last use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, name: str, size_bytes: int) -> None:
        """Records an image that was fetched."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_durably(str(self._record(name)), {"name": name, "size_bytes": size_bytes})

    def use(self, name: str) -> None:
        """Records that an attempt needs an image. Does nothing if the agent has not fetched it."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._record(name))

    def all(self) -> Iterator[FetchedImage]:
        """Yields the images. Removes damaged records; their images stay on the machine."""
        for record in self._folder.glob("*.json"):
            try:
                body = json.loads(record.read_bytes())
                yield FetchedImage(record.stat().st_mtime, str(body["name"]), int(body["size_bytes"]), record)
            except FileNotFoundError:
                continue
            except (ValueError, KeyError, TypeError) as error:
                _log.warning("the record %s is damaged and is removed; its image stays: %s", record, error)
                record.unlink(missing_ok=True)

    def remove_old(
        self, engine: ContainerEngine, needed: Collection[str], keep_s: float, at_most_bytes: int
    ) -> list[str]:
        """Removes images that were not used for `keep_s`, then the longest unused ones over `at_most_bytes` together.

        Images in `needed` and those of containers stay. Returns the names of the removed ones.

        Raises:
            EngineError: the engine does not answer.
        """
        images = sorted(self.all())
        size_bytes = sum(image.size_bytes for image in images)
        removed = []
        for image in images:
            is_old = time.time() - image.used_at_s > keep_s
            if image.name in needed or not (is_old or size_bytes > at_most_bytes):
                continue
            try:
                engine.remove_image(image.name)
            except EngineError as error:
                if error.status != CONFLICT:
                    raise
                continue
            image.record.unlink(missing_ok=True)
            size_bytes -= image.size_bytes
            removed.append(image.name)
        return removed

    def _record(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()}.json"
