"""`mizzen.Executor` on a running stack: calls, results, exceptions, and what the client is told about mistakes."""

from collections.abc import Iterator
from typing import Any

import pytest

import mizzen
from mizzen.functions.errors import RemoteTraceback
from tests.stack.harness import Up

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]


def executor(stack: Up, **options: Any) -> mizzen.Executor:
    """Returns an executor whose calls need little."""
    return mizzen.Executor(cpus=0.1, memory="128MiB", tenant="t", client=stack.client(), **options)


@pytest.fixture(scope="module")
def ex(shared: Up) -> Iterator[mizzen.Executor]:
    """An executor that the tests of this module share."""
    with executor(shared) as found:
        yield found


def test_map_is_one_array(shared: Up, ex: mizzen.Executor) -> None:
    """The results are in the order of the arguments, and there is one workload."""
    before = len(list(shared.client().workloads()))
    assert list(ex.map(lambda x: x * x, range(10))) == [x * x for x in range(10)]
    assert len(list(shared.client().workloads())) == before + 1


def test_exceptions_have_their_traceback(ex: mizzen.Executor) -> None:
    """Calls of `submit` within a moment are one array; an exception is the function's own."""

    class Odd(Exception):
        pass

    def fail(text: str) -> None:
        raise Odd(text)

    good, bad = ex.submit(pow, 2, exp=5), ex.submit(fail, "no luck")
    assert good.result(120) == 32
    error = bad.exception(120)
    assert type(error) is Odd and error.args == ("no luck",)
    assert isinstance(error.__cause__, RemoteTraceback) and "raise Odd(text)" in str(error.__cause__)
    assert good.workload is not None and bad.workload == good.workload.removesuffix("0") + "1"
