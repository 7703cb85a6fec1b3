"""Exit codes: the one place that says which there are, and which error gives which."""

from enum import IntEnum

from mizzen.client import errors


class Exit(IntEnum):
    """How the command ended."""

    OK = 0
    WORKLOAD_FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    REFUSED = 4
    CONFLICT = 5
    UNAVAILABLE = 6
    IMPOSSIBLE = 7
    DAMAGED = 8
    FAULT = 70
    INTERRUPTED = 130
    PIPE = 141


MEANINGS: dict[Exit, str] = {
    Exit.OK: "done",
    Exit.WORKLOAD_FAILED: "a workload failed or was cancelled (wait, submit --wait, submit --follow)",
    Exit.USAGE: "wrong usage, or a document that is not valid",
    Exit.NOT_FOUND: "there is no such workload, machine, tenant, checkpoint, ...",
    Exit.REFUSED: "the API key is missing, unknown, or may not do this",
    Exit.CONFLICT: "the present state does not allow it",
    Exit.UNAVAILABLE: "the API, or a store, cannot be reached, is unavailable or has a fault",
    Exit.IMPOSSIBLE: "no region could ever hold it as the fleet is (submit --dry-run)",
    Exit.DAMAGED: "a checkpoint is damaged (checkpoint verify, checkpoint export)",
    Exit.FAULT: "a fault in the command itself",
    Exit.INTERRUPTED: "interrupted (Ctrl-C)",
    Exit.PIPE: "the reader of the output went away (`| head`)",
}

_OF_ERRORS: tuple[tuple[type[errors.ClientError], Exit], ...] = (
    (errors.NotFound, Exit.NOT_FOUND),
    (errors.UnknownReference, Exit.NOT_FOUND),
    (errors.NotAllowed, Exit.REFUSED),
    (errors.Conflict, Exit.CONFLICT),
    (errors.Unavailable, Exit.UNAVAILABLE),
    (errors.Unreachable, Exit.UNAVAILABLE),
)


def exit_of(error: errors.ClientError) -> Exit:
    """The exit code for an error of the client; what is not in the list was wrong usage."""
    return next((code for kind, code in _OF_ERRORS if isinstance(error, kind)), Exit.USAGE)


def table() -> str:
    """The codes and their meanings, one a line."""
    return "\n".join(f"{code.value:>3}  {text}" for code, text in MEANINGS.items())
