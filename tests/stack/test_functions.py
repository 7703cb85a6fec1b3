"""`mizzen.Executor` on a running stack: calls, results, exceptions, and what the client is told about mistakes."""

import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, as_completed, wait
from importlib import import_module
from pathlib import Path
from typing import Any

import joblib
import pytest

import mizzen
from mizzen_client import submitit
from mizzen_client.errors import ClientError
from mizzen_client.functions.calls import MAX_RESULT_BYTES
from mizzen_client.functions.errors import CallFailed, RemoteTraceback
from tests.stack.harness import Up, processes_of, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]


def executor(stack: Up, **options: Any) -> mizzen.Executor:
    """Returns an executor whose calls need little."""
    return mizzen.Executor(cpus=0.1, memory="128MiB", tenant="t", client=stack.client(), **options)


@pytest.fixture(scope="module")
def ex(shared: Up) -> Iterator[mizzen.Executor]:
    """An executor that the tests of this module share."""
    with executor(shared) as found:
        yield found
        found.shutdown(cancel_futures=True)


@pytest.mark.rotating
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


def test_futures_of_the_standard_library(ex: mizzen.Executor) -> None:
    """`wait` and `as_completed` work, `result` times out, and callbacks run."""

    def work(s: float) -> float:
        time.sleep(s)
        return s

    slow, fast = ex.submit_array(work, [600, 0])
    called = threading.Event()
    fast.add_done_callback(lambda _: called.set())
    done, left = wait([slow, fast], timeout=120, return_when=FIRST_COMPLETED)
    assert (done, left) == ({fast}, {slow}) and called.wait(10)
    with pytest.raises(TimeoutError):
        slow.result(timeout=0.1)
    wait_until(slow.running, "the slow call runs")
    # A call that runs can be cancelled: its element is, too.
    assert slow.cancel() and slow.cancelled() and not slow.running()
    assert not fast.cancel()
    assert list(as_completed([slow, fast], timeout=10)) in ([slow, fast], [fast, slow])


def test_cancel_stops_the_element(shared: Up, ex: mizzen.Executor) -> None:
    """A future that is cancelled cancels its element; all of them together are one request."""
    futures = ex.submit_array(time.sleep, [600, 601, 602])
    assert futures[1].cancel() and futures[1].workload is not None
    wait_until(lambda: shared.phase(futures[1].workload) == "cancelled", "the element is cancelled")
    ex.cancel(futures)
    array = futures[1].workload.removesuffix("-1")
    wait_until(lambda: shared.phase(array) == "cancelled", "the array is cancelled")
    with pytest.raises(CancelledError):
        futures[0].result(10)


@pytest.mark.rotating
def test_a_failed_call_cancels_the_rest_of_a_map(shared: Up, ex: mizzen.Executor) -> None:
    """As in the standard library, where the calls must not run yet; here they may."""
    with pytest.raises(TypeError, match="bad operand type"):
        list(ex.map(lambda x: time.sleep(-x), ["a", -600]))
    newest = next(iter(shared.client().workloads(labels={"mizzen-executor": ex.id})))
    wait_until(lambda: shared.phase(newest["id"]) == "failed", "the array has ended")


@pytest.mark.rotating
def test_chunks(ex: mizzen.Executor) -> None:
    """`chunksize` puts several calls into an element."""
    assert list(ex.map(pow, range(5), [2] * 5, chunksize=2)) == [0, 1, 4, 9, 16]


def test_results_are_not_kept(ex: mizzen.Executor) -> None:
    """Neither the iterator nor the executor keeps a result that was taken; a slow call ends the iteration in time."""

    class Large:
        pass

    def make(seconds: float) -> Large:
        time.sleep(seconds)
        return Large()

    results = ex.map(make, [0, 600], timeout=60)
    taken = weakref.ref(next(results))
    wait_until(lambda: taken() is None, "the result is freed", timeout_s=10)
    results.close()  # type: ignore[attr-defined]
    waiting = ex.map(make, [600], timeout=0.5)
    with pytest.raises(TimeoutError):
        next(waiting)
    newest = next(iter(ex.client.workloads(labels={"mizzen-executor": ex.id})))
    wait_until(lambda: ex.client.workload(newest["id"])["phase"] == "cancelled", "the rest is cancelled")


def test_ctrl_c(shared: Up) -> None:
    """Ctrl-C in the block cancels what has not ended, or leaves it alone."""
    futures = {}
    for detach in (False, True):
        with pytest.raises(KeyboardInterrupt), executor(shared, detach=detach) as ex:
            futures[detach] = ex.submit(time.sleep, 600)
            ex.flush()
            raise KeyboardInterrupt
    assert futures[False].cancelled() and not futures[True].done()
    assert shared.phase(str(futures[False].workload)) in ("cancelled", "checkpointing")
    assert futures[True].cancel()


def test_a_batch_that_fails_submits_nothing(ex: mizzen.Executor) -> None:
    """Its calls are cancelled."""
    with pytest.raises(KeyError), ex.batch():
        future = ex.submit(pow, 2, 2)
        raise KeyError
    assert future.cancelled() and future.workload is None


def test_a_task_that_dies_has_no_outcome(ex: mizzen.Executor) -> None:
    """The error names the workload and the reason."""
    with pytest.raises(CallFailed, match=r"wl-\w+ has failed: .*exit code 3.*mizzen logs wl-"):
        ex.submit(os._exit, 3).result(120)


def test_modules_of_the_folder(shared: Up, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `workdir` tasks import the modules of the client; without, the error says so."""
    (tmp_path / "training_of_mine.py").write_text("def train(rate, *, steps):\n    return rate * steps\n")
    monkeypatch.syspath_prepend(tmp_path)
    train = import_module("training_of_mine").train
    with executor(shared, workdir=tmp_path) as own, executor(shared) as bare:
        good, bad = own.submit(train, 2, steps=3), bare.submit(train, 2, steps=3)
        assert good.result(120) == 6
        with pytest.raises(ModuleNotFoundError, match=r"train needs the module 'training_of_mine'.*workdir="):
            bad.result(120)


def test_gangs(shared: Up) -> None:
    """All tasks run the function, and the result is that of the first."""
    with executor(shared, tasks=2) as ex:
        assert ex.submit(lambda: (os.environ["RANK"], os.environ["WORLD_SIZE"])).result(120) == ("0", "2")


def test_a_call_continues_after_a_preemption(shared: Up, ex: mizzen.Executor) -> None:
    """A function with a method `checkpoint` starts again with the state that the method returned."""

    class Count:
        def __init__(self) -> None:
            self.n = 0
            self.starts: list[int] = []

        def __call__(self, limit: int) -> list[int]:
            self.starts.append(self.n)
            print(f"begins at {self.n}", flush=True)
            while self.n < limit:
                self.n += 1
                time.sleep(0.1 if len(self.starts) == 1 else 0)
            return self.starts

        def checkpoint(self, limit: int) -> "Count":
            return self

    future = ex.submit(Count(), 3000)
    ex.flush()
    id_ = str(future.workload)
    wait_until(lambda: b"begins at 0" in list(shared.client().logs(id_)), "it counts")
    time.sleep(1)
    shared.client().preempt(id_)
    first, second = future.result(200)
    assert first == 0 and 0 < second < 3000


@pytest.mark.rotating
def test_results_are_fetched_later(shared: Up) -> None:
    """Another process fetches the results by the id, also one of an element; not those of another tenant."""
    ex = executor(shared)
    futures = ex.submit_array(lambda x: x + 1, range(3))
    array = str(futures[0].workload).removesuffix("-0")
    ex.shutdown(wait=False)
    with pytest.raises(RuntimeError, match="after shutdown"):
        ex.submit(pow, 2, 2)
    found = mizzen.Executor.attach(array, tenant="t", client=shared.client())
    assert [future.result(120) for future in found] == [1, 2, 3]
    [one] = mizzen.Executor.attach(f"{array}-2", tenant="t", client=shared.client())
    assert one.result(60) == 3
    with pytest.raises(PermissionError, match=r"belongs to tenant t.*attach\(.*tenant='t'\)"):
        mizzen.Executor.attach(array, tenant="u", client=shared.client())


def test_mistakes_are_told_at_once(shared: Up, ex: mizzen.Executor) -> None:
    """What cannot be pickled is named before anything is submitted; the API names a field of the document."""
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"function .*<lambda>: variable 'lock' cannot be pickled: lock:"):
        ex.submit(lambda: lock)
    with pytest.raises(TypeError, match=r"argument 0 of pow\['a'\]\[1\] cannot be pickled: lock:"):
        ex.submit(pow, {"a": [1, lock]})
    with executor(shared, gpuss="a100:1") as wrong:
        with pytest.raises(ClientError, match="gpuss"):
            wrong.submit_array(pow, [2], [3])
        with pytest.raises(ClientError, match="gpuss"):
            wrong.submit(pow, 2, 3).result(60)


def test_a_result_that_cannot_come_back(ex: mizzen.Executor) -> None:
    """A result that cannot be pickled, and one that is too large, are named."""
    lock, large = ex.submit(lambda: {"lock": threading.Lock()}), ex.submit(lambda: bytes(MAX_RESULT_BYTES))
    with pytest.raises(TypeError, match=r"the result\['lock'\] cannot be pickled: lock"):
        lock.result(120)
    with pytest.raises(ValueError, match=r"the result of bytes has \d+ bytes, more than the limit of"):
        large.result(120)


@pytest.mark.long
def test_the_api_restarts(shared: Up) -> None:
    """Futures survive while the API is away."""
    with executor(shared) as ex:
        future = ex.submit(lambda: time.sleep(8) or "done")
        ex.flush()
        [api] = (pid for pid, command in processes_of(shared.data).items() if " api" in command)
        os.kill(api, signal.SIGKILL)
        assert future.result(120) == "done"


@pytest.mark.rotating
def test_submitit(shared: Up, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script of submitit runs with another import."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.txt").write_text("from here")
    executor = submitit.AutoExecutor(folder="logs", client=shared.client())
    executor.update_parameters(name="sub", timeout_min=5, cpus_per_task=1, mem_gb=0.125, slurm_array_parallelism=2)
    executor.update_parameters(mizzen_tenant="t", slurm_partition="gpu")
    with pytest.warns(UserWarning, match=r"slurm_nodelist.*cannot name machines"):
        executor.update_parameters(slurm_nodelist="n1")

    def read(suffix: str) -> str:
        print("reads")
        return Path("data.txt").read_text() + suffix + submitit.JobEnvironment().job_id

    jobs = executor.map_array(read, ["1", "2"])
    assert [job.result() for job in jobs] == [f"from here{n}{job.job_id}" for n, job in enumerate(jobs, 1)]
    assert jobs[0].stdout() == "reads\n" and jobs[0].state == "COMPLETED" and jobs[0].done()
    array = shared.client().workload(jobs[0].job_id.removesuffix("-0"))
    assert array["name"] == "sub" and array["array"] is not None and array["array"]["throttle"] == 2
    with executor.batch():
        pair = [executor.submit(pow, 2, 3), executor.submit(pow, 2, "x")]
        with pytest.raises(RuntimeError, match="before the end of its batch"):
            print(pair[0].job_id)
    assert [job.job_id.partition("-")[2][-2:] for job in pair] == ["-0", "-1"]
    assert {job.job_id for job in submitit.helpers.as_completed(pair, timeout=120)} == {job.job_id for job in pair}
    assert pair[0].results() == [8] and pair[0].exception() is None
    assert submitit.FailedJobError is submitit.core.utils.FailedJobError
    with pytest.raises(submitit.core.utils.UncompletedJobError, match="unsupported operand") as raised:
        pair[1].result()
    assert raised.type is submitit.FailedJobError
    job = executor.submit(time.sleep, 600)
    job.cancel()
    with pytest.raises(submitit.UncompletedJobError, match="cancelled"):
        job.result()


@pytest.mark.long
def test_joblib(shared: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    """`joblib.Parallel` runs its calls as workloads."""
    options = {"cpus": 0.1, "memory": "256MiB", "tenant": "t", "client": shared.client()}
    with joblib.parallel_config(backend="mizzen", n_jobs=4, **options):
        assert joblib.Parallel()(joblib.delayed(pow)(n, 2) for n in range(6)) == [0, 1, 4, 9, 16, 25]
        with pytest.raises(TypeError, match="unsupported operand"):
            joblib.Parallel()(joblib.delayed(pow)(n, 2) for n in [1, "x"])
