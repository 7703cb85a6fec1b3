"""Runs one call of a submission in a task: the main program of the archive `calls.pyz` (`calls.py`).

It needs only the standard library: the archive also contains cloudpickle, of the version that pickled the calls. The
task's Python may be without mizzen, unless the function has a method `checkpoint`.
"""

import base64
import hmac
import json
import os
import pickle
import signal
import sys
import traceback
import zipfile
import zlib
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

MARK = "mizzen-result"
"""Starts the lines of the output that contain the result."""
_LINE_BYTES = 3000
_DEEPEST = 8
_MOST_MEMBERS = 10_000


def main(archive: str) -> int:
    """Run the call of this task and print its outcome. Return the exit status: 1 after an exception of the function."""
    with zipfile.ZipFile(archive) as file:
        about = json.loads(file.read("about.json"))
        sys.path[:] = [str(Path.cwd()), archive, *(path for path in sys.path if path != archive)]
        position = int(os.environ.get("MIZZEN_ARRAY_INDEX", "0"))
        try:
            _check_python(about)
            function, arguments, keywords = _load(file, about["calls"][position])
            with _Checkpoints(function, arguments, keywords) as call:
                value = call.run()
            body, failed = _pickled(value, about, "the result"), False
        except BaseException as error:
            traceback.print_exc()
            body, failed = _raised(error, about), True
    if os.environ.get("RANK", "0") == "0" or failed:
        _print(body, about["key"])
    return int(failed)


def _check_python(about: dict[str, Any]) -> None:
    mine, its = list(sys.version_info[:2]), about["python"]
    if mine != its or about["protocol"] > pickle.HIGHEST_PROTOCOL:
        raise RuntimeError(
            f"the call was pickled by Python {its[0]}.{its[1]} with protocol {about['protocol']}, but the task runs"
            f" Python {mine[0]}.{mine[1]} (in {sys.prefix}) with protocol {pickle.HIGHEST_PROTOCOL}: name an"
            f" interpreter of version {its[0]}.{its[1]} in Executor(python=...), or an image that has one"
        )


def _load(file: zipfile.ZipFile, call: list[str]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the function and the arguments of a call."""
    name, *entries = call
    try:
        function, (arguments, keywords) = (pickle.loads(file.read(entry)) for entry in entries)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{name} needs the module {error.name!r}, which the task's Python (in {sys.prefix}) does not have: name"
            " the folder of your modules in Executor(workdir=...), or install it in the task",
            name=error.name,
        ) from None
    return function, arguments, keywords


class _Checkpoints:
    """A call. If its function has a method `checkpoint`, a notice to stop saves what the method returns."""

    def __init__(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._call = (function, arguments, keywords)
        self._saver: Any = None

    def __enter__(self) -> "_Checkpoints":
        if not callable(getattr(self._call[0], "checkpoint", None)) or "MIZZEN_CHECKPOINT_URI" not in os.environ:
            return self
        from mizzen.checkpoint import Checkpointer

        self._saver = Checkpointer()
        found = self._saver.load_latest()
        if found is not None:
            self._call = pickle.loads(found.state["call"])
        self._step = found.step if found is not None else 0
        signal.signal(signal.SIGTERM, self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        if self._saver is not None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def run(self) -> Any:
        """Call the function."""
        function, arguments, keywords = self._call
        return function(*arguments, **keywords)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        import cloudpickle

        function, arguments, keywords = self._call
        after = function.checkpoint(*arguments, **keywords)
        if hasattr(after, "function"):  # submitit's `DelayedSubmission`.
            function, arguments, keywords = after.function, after.args, after.kwargs
        else:
            function = after
        if self._saver.writer:
            self._saver.save(self._step + 1, {"call": cloudpickle.dumps((function, arguments, keywords))})
        os._exit(128 + signal.SIGTERM)


def _pickled(value: Any, about: dict[str, Any], label: str) -> bytes:
    """Return the pickle of a successful outcome.

    Raises:
        TypeError: the value cannot be pickled. The message names the part of it that cannot.
        ValueError: the pickle is larger than the limit of the submission.
    """
    body = dumps(value, label, about["protocol"])
    if len(body) > about["max_result_bytes"]:
        raise ValueError(
            f"{label} of {type(value).__name__} has {len(body)} bytes, more than the limit of"
            f" {about['max_result_bytes']}: save large results to a store, and return where they are"
        )
    return b"+" + body


def _raised(error: BaseException, about: dict[str, Any]) -> bytes:
    """Return the pickle of a failed outcome: the exception, or its text if it cannot be pickled, and its traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    try:
        body = dumps(error, "the exception", about["protocol"])
        pickle.loads(body)
        if len(body) <= about["max_result_bytes"]:
            return b"-" + pickle.dumps((body, text))
    except Exception as problem:
        text += f"\nThe exception itself cannot be pickled: {problem}"
    return b"-" + pickle.dumps((None, text[-100_000:]))


def _print(body: bytes, key: str) -> None:
    """Print an outcome in short lines: the output of other processes may come between two lines.

    Each line has a signature of the whole, so that text which the function prints is never taken for an outcome.
    """
    text = base64.b85encode(zlib.compress(body, 1)).decode()
    parts = [text[start : start + _LINE_BYTES] for start in range(0, len(text), _LINE_BYTES)]
    signature = sign(text, key)
    sys.stdout.flush()
    for number, part in enumerate(parts, 1):
        line = f"{MARK} {number}/{len(parts)} {signature} {part}\n"
        os.write(1, line.encode())


def sign(text: str, key: str) -> str:
    """Return the signature of an encoded outcome, in hexadecimal."""
    return hmac.new(key.encode(), text.encode(), "sha256").hexdigest()


def dumps(value: Any, label: str, protocol: int = pickle.HIGHEST_PROTOCOL) -> bytes:
    """Return the pickle of `value`, also of functions and classes of the main program.

    Raises:
        TypeError: the value cannot be pickled. The message starts with `label` and names the part of it that cannot.
    """
    import cloudpickle

    try:
        body: bytes = cloudpickle.dumps(value, protocol)
        return body
    except Exception as error:
        path, part, reason = _blame(value, error)
        raise TypeError(
            f"{label}{path} cannot be pickled: {type(part).__name__}: {reason}; create it in the function instead, or"
            " give its class a method __reduce__"
        ) from None


def _blame(value: Any, error: Exception, depth: int = 0) -> tuple[str, Any, Exception]:
    """Return the path in `value` to the smallest part that cannot be pickled, that part, and its error."""
    import cloudpickle

    for path, part in _members(value) if depth < _DEEPEST else ():
        try:
            cloudpickle.dumps(part)
        except Exception as inner:
            below, found, reason = _blame(part, inner, depth + 1)
            return path + below, found, reason
    return "", value, error


def _members(value: Any) -> list[tuple[str, Any]]:
    """Return the parts of a value, each with its path."""
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        own = [(f": variable {name!r}", cell.cell_contents) for name, cell in cells]
        names = value.__code__.co_names
        own += [(f": global {name!r}", value.__globals__[name]) for name in names if name in value.__globals__]
        return own + [(": a default", default) for default in value.__defaults__ or ()]
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in list(value.items())[:_MOST_MEMBERS]]
    if isinstance(value, list | tuple):
        return [(f"[{index}]", part) for index, part in enumerate(value[:_MOST_MEMBERS])]
    if isinstance(value, type):
        return []
    return [(f".{name}", part) for name, part in getattr(value, "__dict__", {}).items()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[0]))
