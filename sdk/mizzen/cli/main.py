"""Entry point of the `mizzen` command: without the extra `client` it says what to install."""

import sys
from importlib.util import find_spec

_NEEDED = {"click": "click", "httpx": "httpx", "yaml": "pyyaml"}


def main() -> None:
    """Run the command line in `sys.argv` and exit with one of the documented codes (`mizzen.cli.exits`)."""
    missing = [distribution for module, distribution in _NEEDED.items() if find_spec(module) is None]
    if missing:
        print(f"mizzen: the command needs {', '.join(missing)}: pip install 'mizzen[client]'", file=sys.stderr)
        sys.exit(2)
    try:
        from mizzen.cli.app import run
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
