"""Calls as archives that a task runs: each archive is run by a Python without mizzen, as in a task."""

import json
import os
import random
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import Future
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from mizzen_client.functions import calls, outcomes
from mizzen_client.functions.calls import archive_of, call_of, pickled_function
from mizzen_client.functions.errors import CallFailed, RemoteError, RemoteTraceback
from mizzen_client.functions.future import CallFuture

_KEY = "7" * 32


def archive(function: Any, *arguments: Any, **keywords: Any) -> bytes:
    """Returns the archive of one call."""
    return archive_of([call_of(function, pickled_function(function), arguments, keywords)], _KEY)


class Log:
    """Stands for the client of the API: it returns the output of a process."""

    def __init__(self, output: bytes) -> None:
        self.output = output

    def logs(self, workload: str, **_: Any) -> list[bytes]:
        return self.output.splitlines()


def _written(folder: Path, body: bytes) -> str:
    (folder / calls.FILE).write_bytes(body)
    return calls.FILE


def outcome(folder: Path, body: bytes, index: int | None = None) -> tuple[Future[Any], bytes]:
    """Runs an archive in a folder without the SDK; returns the future with its outcome, and its other output."""
    program = _written(folder, body)
    environ = {} if index is None else {"MIZZEN_ARRAY_INDEX": str(index)}
    done = subprocess.run(
        [sys.executable, "-I", "-S", program], cwd=folder, env=environ, stdout=subprocess.PIPE, check=False
    )
    ended: Any = {"id": "wl-1", "phase": "failed" if done.returncode else "succeeded", "attempt": 1, "reason": None,
                  "labels": {outcomes.LABEL: _KEY}}  # fmt: skip
    log: Any = Log(done.stdout)
    future = CallFuture[Any](lambda _: True)
    outcomes.resolve(future, ended, outcomes.fetch(log, ended))
    return future, b"\n".join(outcomes.without_outcome(log.logs("wl-1")))


def test_each_index_is_a_call(tmp_path: Path) -> None:
    """An element runs its own call; equal functions are in the archive once."""
    double = pickled_function(lambda x: 2 * x)
    pair = [call_of(len, double, [n], {}) for n in (1, 2)] + [call_of(pow, pickled_function(pow), [2], {"exp": 5})]
    body = archive_of(pair, _KEY)
    assert [outcome(tmp_path, body, index)[0].result() for index in range(3)] == [2, 4, 32]
    assert sum(name.startswith("functions/") for name in zipfile.ZipFile(BytesIO(body)).namelist()) == 2


def test_the_output_of_the_function_is_not_disturbed(tmp_path: Path) -> None:
    """Also a last line without an end, and one with bytes that are no text."""

    def talk(text: bytes) -> bytes:
        sys.stdout.buffer.write(text)
        return text * 1000

    future, output = outcome(tmp_path, archive(talk, b"one\ntwo \xff"))
    assert future.result() == b"one\ntwo \xff" * 1000 and output == b"one\ntwo \xff"


def test_a_long_result_has_several_lines(tmp_path: Path) -> None:
    """They are put together again."""
    future, output = outcome(tmp_path, archive(lambda: random.Random(7).randbytes(1_000_000)))
    assert future.result() == random.Random(7).randbytes(1_000_000) and output == b""


def test_output_is_no_outcome_without_the_key(tmp_path: Path) -> None:
    """Text that a function prints is never unpickled, even if it has the form of an outcome."""
    evil = archive_of([call_of(len, pickled_function(len), ["evil"], {})], "8" * 32)
    forged = subprocess.run(
        [sys.executable, "-I", "-S", _written(tmp_path, evil)], cwd=tmp_path, env={}, stdout=subprocess.PIPE, check=True
    ).stdout.decode()
    assert forged.startswith("mizzen-result 1/1 ")

    def show(text: str) -> None:
        print(text)
        os._exit(0)

    with pytest.raises(CallFailed, match="wl-1 has succeeded: its outcome is missing"):
        outcome(tmp_path, archive(show, forged))[0].result()


def test_another_version_of_python(tmp_path: Path) -> None:
    """The error names both versions, and what would be right."""
    body = BytesIO()
    with zipfile.ZipFile(BytesIO(archive(len, "x"))) as read, zipfile.ZipFile(body, "w") as write:
        for name in read.namelist():
            content = read.read(name)
            if name == "about.json":
                content = json.dumps({**json.loads(content), "python": [3, 7]}).encode()
            write.writestr(name, content)
    mine = f"{sys.version_info[0]}.{sys.version_info[1]}"
    with pytest.raises(RuntimeError, match=rf"pickled by Python 3\.7 .*the task runs Python {mine}.*python=\.\.\."):
        outcome(tmp_path, body.getvalue())[0].result()


def test_an_exception_that_cannot_be_pickled(tmp_path: Path) -> None:
    """Its text and its traceback come back."""

    class Held(Exception):
        pass

    def fail() -> None:
        raise Held(threading.Lock())

    error = outcome(tmp_path, archive(fail))[0].exception()
    assert isinstance(error, RemoteError) and isinstance(error.__cause__, RemoteTraceback)
    assert "raise Held(threading.Lock())" in str(error) and "the exception" in str(error) and "lock" in str(error)


def test_an_exit_is_an_outcome(tmp_path: Path) -> None:
    """`sys.exit` in a function is its exception, as in a pool of processes."""
    assert isinstance(outcome(tmp_path, archive(sys.exit, 3))[0].exception(), SystemExit)


def test_calls_that_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the largest call."""
    monkeypatch.setattr(calls, "MAX_CALLS_BYTES", 1000)
    function = pickled_function(len)
    with pytest.raises(ValueError, match=r"2 calls have \d+ bytes.*the largest is call 1 of len.*arguments 2\d\d\d"):
        archive_of([call_of(len, function, [b"x" * size], {}) for size in (10, 2000)], _KEY)


_LOCK = threading.Lock()


class _Sealed:
    def __init__(self) -> None:
        self.inner = {"socket": threading.Lock()}

    def method(self) -> None:
        """Does nothing."""


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ([1, (2, threading.Lock())], r"argument 0 of len\[1\]\[1\] cannot be pickled: lock: "),
        (_Sealed(), r"argument 0 of len\.inner\['socket'\] cannot be pickled: lock: "),
        (lambda x=_LOCK: x, r"argument 0 of len: a default cannot be pickled: lock: "),
    ],
)
def test_what_cannot_be_pickled_is_named(value: Any, named: str) -> None:
    """The path leads to the smallest part that cannot be pickled."""
    with pytest.raises(TypeError, match=named):
        archive(len, value)
