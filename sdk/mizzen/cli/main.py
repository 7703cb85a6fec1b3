"""Entry point of the `mizzen` command. If the extra `client` is not installed, it prints what to install.

The commands of `mizzen.cli.plain` do not need the extra and import nothing from it.
"""

import os
import sys
from importlib.util import find_spec

_NEEDED = {"click": "click", "httpx": "httpx", "yaml": "pyyaml"}
_COMPLETE_VARIABLE = "_MIZZEN_COMPLETE"
_MOVED: dict[tuple[str, ...], str] = {("reclaim", "simulate"): "reclaim-simulate"}
"""Commands of the server's distribution whose first word is a command of `plain`."""


def main() -> None:
    """Run the command line in `sys.argv` and exit with one of the documented codes (`mizzen.cli.exits`)."""
    try:
        from mizzen.cli.plain.running import COMMANDS
        from mizzen.cli.plain.running import run as run_plain

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


if __name__ == "__main__":
    main()
