"""The measured blocks of an interface, kept in the agent's state folder while the agent restarts.

They are valid for one boot, because their times are of a clock that starts with it, and for one interface.
"""

import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent import records, shim

_MOST_FILE_BYTES = 16_384
_log = logging.getLogger(__name__)

Block = tuple[float, float]
"""When a block ended, in seconds since the boot, and its rate in bytes per second."""


@dataclass(frozen=True)
class KeptBlocks:
    """Blocks of one interface, the oldest first."""

    index: int
    """The interface's number."""
    blocks: tuple[Block, ...] = ()


class BlockFile:
    """The file with the blocks. Its methods block, and never raise because of what the disk does or contains."""

    def __init__(self, path: Path, most_blocks: int, most_bytes_s: float) -> None:
        """Prepares the file; it need not exist. More blocks than `most_blocks`, or faster ones, are not valid."""
        self._path, self._most_blocks, self._most_bytes_s = path, most_blocks, most_bytes_s

    def read(self) -> KeptBlocks | None:
        """Returns what was written last in this boot; None: nothing, or it is not valid."""
        try:
            with open(self._path, "rb") as file:
                content = file.read(_MOST_FILE_BYTES + 1)
            if len(content) > _MOST_FILE_BYTES:
                raise ValueError(f"more than {_MOST_FILE_BYTES} bytes")
            body = json.loads(content)
            if not isinstance(body, dict):
                raise ValueError("not a JSON object")
            return self._checked(body) if body.get("boot_id") == shim.boot_id() else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, OverflowError, RecursionError) as error:
            _log.warning("%s: ignored, the bandwidth is measured again: %s", self._path, error)
            return None

    def write(self, kept: KeptBlocks) -> None:
        """Replaces the file. If that fails, the file stays as it was, and the next call tries it again."""
        blocks = [[round(at_s, 3), round(bytes_s)] for at_s, bytes_s in kept.blocks]
        try:
            records.write_durably(str(self._path), {"boot_id": shim.boot_id(), "index": kept.index, "blocks": blocks})
        except OSError as error:
            _log.warning("%s: the measured bandwidth is not kept: %s", self._path, error)

    def _checked(self, body: dict[str, Any]) -> KeptBlocks:
        index, blocks = body.get("index"), body.get("blocks")
        if not isinstance(index, int) or isinstance(index, bool) or index < 1:
            raise ValueError(f"index={index!r}: must be the number of an interface, 1 or more")
        if not isinstance(blocks, list) or len(blocks) > self._most_blocks:
            raise ValueError(f"blocks: must be a list of at most {self._most_blocks}")
        found: list[Block] = []
        for block in blocks:
            if not isinstance(block, list) or len(block) != 2 or not all(type(part) in (int, float) for part in block):
                raise ValueError(f"block {str(block)[:100]}: must be two numbers")
            at_s, bytes_s = float(block[0]), float(block[1])
            if not (math.isfinite(at_s) and at_s >= (found[-1][0] if found else 0.0)):
                raise ValueError(f"block {block}: its time must be finite and not before that of the previous block")
            if not 0 <= bytes_s <= self._most_bytes_s:
                raise ValueError(
                    f"block {block}: its rate must be 0 or more and at most {self._most_bytes_s:g} bytes/s"
                )
            found.append((at_s, bytes_s))
        return KeptBlocks(index, tuple(found))
