"""Reads the agent's records. A disk may have damaged one of them, which must not keep the agent from its other work."""

import contextlib
import errno
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_DAMAGE = (errno.EIO, errno.EISDIR, errno.EUCLEAN)
"""Errors of a read that say that the record itself is damaged. Others may pass."""
_MOST_WORDS = 300
_log = logging.getLogger(__name__)
_warned = set[Path]()


class DamagedRecord(ValueError):
    """A record cannot be read. The message names the file and its damage."""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises what is wrong with the content of the record at `path`, which the block reads, as `DamagedRecord`."""
    try:
        yield
    except ValueError as error:
        raise DamagedRecord(f"the record {path} is damaged: {str(error)[:_MOST_WORDS]}") from None
    except OSError as error:
        if error.errno not in _DAMAGE:
            raise
        raise DamagedRecord(f"the record {path} is damaged: {error.strerror}") from None


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file, or None if the file does not exist.

    Raises:
        DamagedRecord: it is not JSON, or cannot be read.
    """
    try:
        with reading(path):
            return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None


def read_sound(path: Path) -> dict[str, Any] | None:
    """Returns the JSON object in a file; None: the file does not exist. A damaged one is empty, and is logged."""
    try:
        body = read_json(path)
        if body is None or isinstance(body, dict):
            return body
        raise DamagedRecord(f"the record {path} is damaged: it is no JSON object")
    except DamagedRecord as error:
        if path not in _warned:
            _warned.add(path)
            _log.error("%s", error)
        return {}
