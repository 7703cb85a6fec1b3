"""Pickles calls of functions into an archive that a task can run: `python calls.pyz`.

Each function is pickled once in a submission, and each call has an entry with its arguments, so that a task loads only
its own. The archive also contains the runner, and cloudpickle of the version that wrote the pickles.
"""

import io
import json
import pickle
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mizzen_client.functions import runner

FILE = "calls.pyz"
"""Name of the archive in the working directory of a task."""
MAX_RESULT_BYTES = 4 << 20
"""Limit on the pickle of one result."""
MAX_CALLS_BYTES = 256 << 20
"""Limit on the pickles of one submission. The API's limit on packed working directories is usually lower."""
_TIME = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class PickledCall:
    """One call. `function` and `arguments` are pickles."""

    name: str
    function: bytes
    arguments: bytes


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function for messages."""
    inner = getattr(function, "func", function)  # of `functools.partial`
    return str(getattr(inner, "__qualname__", None) or type(inner).__qualname__)


def pickled_function(function: Callable[..., Any]) -> bytes:
    """Return the pickle of a function.

    Raises:
        TypeError: it is not callable, or cannot be pickled; the message names the part that cannot.
    """
    if not callable(function):
        raise TypeError(f"{function!r} is not callable")
    return runner.dumps(function, f"function {name_of(function)}")


def call_of(
    function: Callable[..., Any], pickled: bytes, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> PickledCall:
    """Return the call of a function whose pickle is `pickled`.

    Raises:
        TypeError: an argument cannot be pickled; the message names it.
    """
    name = name_of(function)
    try:
        body = runner.dumps((tuple(arguments), dict(keywords)), "")
    except TypeError:
        for key, value in [*enumerate(arguments), *keywords.items()]:
            runner.dumps(value, f"argument {key!r} of {name}")
        raise
    return PickledCall(name, pickled, body)


def archive_of(calls: Sequence[PickledCall], key: str) -> bytes:
    """Return the archive of a submission, whose tasks sign their outcomes with `key`.

    The index of an element of the array is the position of its call.

    Raises:
        ValueError: the calls are too large; the message names the largest.
    """
    total = sum(len(body) for body in {call.function for call in calls}) + sum(len(call.arguments) for call in calls)
    if total > MAX_CALLS_BYTES:
        position, largest = max(enumerate(calls), key=lambda pair: len(pair[1].arguments) + len(pair[1].function))
        raise ValueError(
            f"{len(calls)} calls have {total} bytes, more than the limit of {MAX_CALLS_BYTES}; the largest is call"
            f" {position} of {largest.name}: its function has {len(largest.function)} bytes, its arguments"
            f" {len(largest.arguments)}. Put large inputs into a table or a store, and pass where they are"
        )
    functions = {body: f"functions/{number}" for number, body in enumerate(dict.fromkeys(c.function for c in calls))}
    about = {
        "python": list(sys.version_info[:2]),
        "protocol": pickle.HIGHEST_PROTOCOL,
        "key": key,
        "max_result_bytes": MAX_RESULT_BYTES,
        "calls": [[call.name, functions[call.function], f"calls/{position}"] for position, call in enumerate(calls)],
    }
    entries = {"__main__.py": Path(runner.__file__).read_bytes(), "about.json": json.dumps(about).encode()}
    entries |= _cloudpickle() | {entry: body for body, entry in functions.items()}
    entries |= {f"calls/{position}": call.arguments for position, call in enumerate(calls)}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:  # Not compressed: the upload compresses the archive as a whole.
        for entry, body in entries.items():
            file.writestr(zipfile.ZipInfo(entry, _TIME), body)
    return out.getvalue()


def require_cloudpickle() -> None:
    """Check that the extra `functions` is installed.

    Raises:
        ImportError: it is not.
    """
    if find_spec("cloudpickle") is None:
        raise ImportError("mizzen.Executor needs cloudpickle: pip install 'mizzen-client[functions]'")


def _cloudpickle() -> dict[str, bytes]:
    """Return the source files of cloudpickle, which the task needs to load the pickles."""
    import cloudpickle

    folder = Path(cloudpickle.__file__).parent
    return {f"cloudpickle/{path.name}": path.read_bytes() for path in sorted(folder.glob("*.py"))}
