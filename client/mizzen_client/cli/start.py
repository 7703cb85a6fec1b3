"""Starts a command line of `mizzen`: with argparse if its command needs no library, else with click."""

import os
from collections.abc import Sequence

from mizzen.cli import runner

COMMANDS = {
    **runner.COMMANDS,
    "reclaim": "mizzen_client.cli.owner_commands:reclaim",
    "lend": "mizzen_client.cli.owner_commands:lend",
    "lending": "mizzen_client.cli.owner_commands:lending",
}
"""The commands that need only the standard library, as in `mizzen.cli.runner.COMMANDS`."""
COMPLETE_VARIABLE = "_MIZZEN_COMPLETE"
"""The environment variable that a completion script sets when it calls the command to get completions."""
_MOVED: dict[tuple[str, ...], str] = {("reclaim", "simulate"): "reclaim-simulate"}
"""Commands of the server's distribution whose first word is one of `COMMANDS`."""


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code. Errors are printed to stderr."""
    if moved := _MOVED.get(tuple(arguments[:2])):
        arguments = [moved, *arguments[2:]]
    if arguments and arguments[0] in COMMANDS and COMPLETE_VARIABLE not in os.environ:
        return runner.run(arguments, COMMANDS)
    from mizzen_client.cli import app

    return app.run(arguments)
