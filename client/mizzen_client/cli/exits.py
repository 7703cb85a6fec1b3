"""The meanings of exit codes, and the mapping from errors to exit codes."""

from mizzen.cli.exits import Exit as Exit
from mizzen_client import errors

MEANINGS: dict[Exit, str] = {
    Exit.OK: "done",
    Exit.WORKLOAD_FAILED: "a workload failed or was cancelled (wait, submit --wait, submit --follow)",
    Exit.USAGE: "wrong usage, or an invalid document",
    Exit.NOT_FOUND: "no such workload, machine, tenant, checkpoint, ...",
    Exit.REFUSED: "the API key is missing, unknown, or lacks the permission",
    Exit.CONFLICT: "the current state does not allow the action",
    Exit.UNAVAILABLE: (
        "the API or an object store is unreachable, unavailable or has an internal error; or a file cannot be written"
    ),
    Exit.IMPOSSIBLE: "no region of the current fleet could ever run the workload (submit --dry-run)",
    Exit.DAMAGED: "a checkpoint is damaged (checkpoint verify, checkpoint export)",
    Exit.INCOMPLETE: "something that changes the result could not be carried over (convert)",
    Exit.FAULT: "an internal error of the command",
    Exit.INTERRUPTED: "interrupted (Ctrl-C)",
    Exit.PIPE: "the reader of the output closed the pipe (`| head`)",
    Exit.CLOSED: "a session in a task was closed before its command had ended (exec)",
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
    """Return the exit code for an error of the client: `USAGE` if its type is not listed."""
    return next((code for kind, code in _OF_ERRORS if isinstance(error, kind)), Exit.USAGE)


def table() -> str:
    """Return the exit codes and their meanings, one per line."""
    return "\n".join(f"{code.value:>3}  {text}" for code, text in MEANINGS.items())
