"""Entry point of the `mizzen` command. If the extra `client` is not installed, it prints what to install.

The commands of `mizzen.cli.plain` do not need the extra and import nothing from it.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

_NEEDED = {"click": "click", "httpx": "httpx", "yaml": "pyyaml", "websockets": "websockets"}
_COMPLETE_VARIABLE = "_MIZZEN_COMPLETE"
_MOVED: dict[tuple[str, ...], str] = {("reclaim", "simulate"): "reclaim-simulate"}
"""Commands of the server's distribution whose first word is a command of `plain`."""


def main() -> None:
    """Run the command line in `sys.argv` and exit with one of the documented codes (`mizzen.cli.exits`)."""
    _prefer_installed()
    try:
        from mizzen.cli.plain.runner import COMMANDS
        from mizzen.cli.plain.runner import run as run_plain

        arguments = sys.argv[1:]
        if moved := _MOVED.get(tuple(arguments[:2])):
            arguments = [moved, *arguments[2:]]
        if arguments and arguments[0] in COMMANDS and _COMPLETE_VARIABLE not in os.environ:
            sys.exit(run_plain(arguments))
        missing = [distribution for module, distribution in _NEEDED.items() if find_spec(module) is None]
        if missing:
            needs = f"this command needs {', '.join(missing)}: pip install 'mizzen[client]'"
            without = " and ".join(f"`mizzen {name}`" for name in COMMANDS)
            print(f"mizzen: {needs}; {without} do not need it", file=sys.stderr)
            sys.exit(2)
        from mizzen.cli.app import run
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(run(arguments))


def _prefer_installed() -> None:
    """Make imports ignore the current folder, and find installed packages before those in folders of `PYTHONPATH`.

    A training project may have a package with the name of one of mizzen's, such as `server`. If mizzen itself is
    imported from such a folder, for example from a checkout, nothing changes.
    """
    first = [] if sys.flags.safe_path else sys.path[:1]  # The current folder, or the folder of the script `mizzen`.
    listed = os.environ.get("PYTHONPATH")
    given = [os.path.abspath(folder) for folder in listed.split(os.pathsep)] if listed else []  # noqa: PTH100
    own = str(Path(__file__).parents[2])
    if own not in (*first, *given):
        known = sys.path[len(first) :]
        sys.path[:] = [path for path in known if path not in given] + [path for path in known if path in given]


if __name__ == "__main__":
    main()
