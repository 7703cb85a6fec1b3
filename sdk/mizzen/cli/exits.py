"""Exit codes of the command. `mizzen_client.cli.exits` has their meanings."""

from enum import IntEnum


class Exit(IntEnum):
    """An exit code of the command."""

    OK = 0
    WORKLOAD_FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    REFUSED = 4
    CONFLICT = 5
    UNAVAILABLE = 6
    IMPOSSIBLE = 7
    DAMAGED = 8
    INCOMPLETE = 9
    FAULT = 70
    INTERRUPTED = 130
    PIPE = 141
    CLOSED = 255
