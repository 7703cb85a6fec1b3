"""Reads the agent's records. A record that the disk has damaged must not stop the agent's other work."""

import errno
import json
import logging
from pathlib import Path
from typing import Any

_DAMAGE = (errno.EIO, errno.EISDIR, errno.EUCLEAN)
"""Errors of a read that mean that the record is damaged. Other errors may be temporary."""
_MOST_WORDS = 300
_log = logging.getLogger(__name__)
_warned = set[str]()


class DamagedRecord(ValueError):
    """A record cannot be read. The message names the file and its damage."""


def damage(path: Path | str, error: OSError | ValueError) -> Exception:
    """Returns the exception for an error of reading the record at `path`: `DamagedRecord`, or the error itself."""
    if isinstance(error, OSError) and error.errno not in _DAMAGE:
        return error
    return DamagedRecord(f"the record {path} is damaged: {str(error)[:_MOST_WORDS]}")


def read_json(path: Path | str) -> Any:
    """Returns the content of a JSON file, or None if the file does not exist.

    Raises:
        DamagedRecord: the file is not JSON, or cannot be read.
    """
    try:
        with open(path, "rb") as file:  # A path's own methods take longer than the reading.
            return json.loads(file.read())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise damage(path, error) from None


def read_sound(path: Path | str) -> dict[str, Any] | None:
    """Returns the JSON object in a file; None: the file does not exist. A damaged one is empty, and is logged."""
    try:
        body = read_json(path)
        if body is None or isinstance(body, dict):
            return body
        raise DamagedRecord(f"the record {path} is damaged: it is not a JSON object")
    except DamagedRecord as error:
        if str(path) not in _warned:
            _warned.add(str(path))
            _log.error("%s", error)
        return {}
