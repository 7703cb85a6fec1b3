"""Entry point of the `mizzen` command."""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    """Run the command line in `sys.argv` and exit with one of the documented codes (`mizzen.cli.exits`)."""
    _prefer_installed()
    try:
        started = import_module("mizzen_client.cli.start" if find_spec("mizzen_client") else "mizzen.cli.runner")
        status: int = started.run(sys.argv[1:])
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


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
