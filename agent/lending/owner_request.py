"""The owner's last command while the agent did not answer: `word.json` in the machine's state folder.

`mizzen reclaim` then writes the file, and stops the tasks itself (`agent.lending.emergency_reclaim`). When the agent
returns, it carries out the command. The file is separate from the agent's own record, because an agent that was stopped
during a write would overwrite the command.
"""

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from agent import records
from agent.lending.owner_record import WORD, LendingFile, OwnerRecord, write_record
from agent.record_files import read_json

_TAKEN = f"{WORD}.taken."


class OwnersWord:
    """The file with the owner's last command, and the commands that the agent has read but not yet recorded.

    The agent renames a file that it has read to `word.json.taken.*`, and deletes it after the command is in its record.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / WORD

    def read(self) -> OwnerRecord | None:
        """Returns what the owner has taken by commands that are not in the agent's record; None: nothing.

        A damaged file counts as a command that takes the whole machine.
        """
        said = None
        for path in (*self._taken(), self._path):
            try:
                body = read_json(path)
                found = None if body is None else OwnerRecord.from_json(body)
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                found = OwnerRecord(machine_at_s=0.0)
            if found is not None:
                said = found if said is None else said.with_word(found)
        return said

    def take(self) -> None:
        """Marks the command as read. Call `adopted` when the agent's record has it."""
        with contextlib.suppress(OSError):
            self._path.rename(self._path.with_name(f"{_TAKEN}{time.time_ns()}"))

    def adopted(self) -> None:
        """Removes the commands that were marked as read."""
        for path in self._taken():
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _taken(self) -> list[Path]:
        return sorted(self._path.parent.glob(f"{_TAKEN}*"))

    def write(self, said: OwnerRecord) -> None:
        """Writes a command durably, for an agent that does not answer.

        Raises:
            OSError: the disk failed.
        """
        write_record(self._path, said)


class FileWithoutAgent(LendingFile):
    """The record for a process that replaces an agent: it stores changes as the owner's command."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._word = OwnersWord(folder)

    def reserve(self) -> None:
        """Reserves nothing: the file is the agent's."""

    def write(self, lending: OwnerRecord) -> None:
        """Writes what the owner has taken as a command.

        Raises:
            OSError: the disk failed.
        """
        # Lending hours lend again what they have taken: that is no command of the owner.
        machine_at_s = None if lending.by_hours else lending.machine_at_s
        self._word.write(OwnerRecord(machine_at_s, gpus_at_s=lending.gpus_at_s))


def pointer(socket: Path) -> Path:
    """Returns the file beside the owner's socket that names the state folder and the Python of the agent."""
    return socket.with_name(f"{socket.name}.json")


def write_pointer(socket: Path, body: dict[str, Any]) -> None:
    """Writes the pointer; only the agent's user can read it.

    Raises:
        OSError: the folder cannot be written.
    """
    records.write_durably(str(pointer(socket)), json.dumps(body).encode())
