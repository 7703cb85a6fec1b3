"""Masking and shipping of task output."""

import asyncio
import gc
import os
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent import output_file, tasks
from agent.logs import LogStream, Shipping, shipped
from agent.logs import _bound as bound
from agent.output_file import MAX_SEGMENT_BYTES, MISSING
from agent.secret_masks import Masker
from agent.tasks import RunFolder
from domain.ids import log_prefix
from domain.launch import LogLaunch
from domain.log_segments import TaskOutput, segment_of
from mizzen.objects import ObjectStore, open_store
from tests.agent.harness import read_log, run_folder

SETTINGS = LogLaunch(segment_bytes=64, interval_s=0.01)


def reference(values: list[str], text: bytes) -> bytes:
    """Returns the text with each connected run of secret values replaced by one mask: a slow reference."""
    starts = [at for v in values if v for at in range(len(text)) if text.startswith(v.encode(), at)]
    lengths = {at: max(len(v.encode()) for v in values if v and text.startswith(v.encode(), at)) for at in starts}
    out, at = b"", 0
    while at < len(text):
        if at not in lengths:
            out += text[at : at + 1]
            at += 1
            continue
        end = at + lengths[at]
        while inside := [s for s in starts if at < s < end and s + lengths[s] > end]:
            end = max(s + lengths[s] for s in inside)
        out += b"***"
        at = end
    return out


texts = st.text(alphabet="ab\n", max_size=60)
values = st.lists(st.text(alphabet="ab\n", max_size=5), max_size=3)


@settings(derandomize=True)
@given(values, texts)
def test_masking_equals_the_reference(secrets: list[str], text: str) -> None:
    """Every byte of every occurrence of a value is masked, and nothing else, even if occurrences overlap."""
    assert Masker(secrets).mask(text.encode()) == reference(secrets, text.encode())


@settings(derandomize=True)
@given(values, texts, st.integers(0, 60))
def test_the_end_of_a_text_is_masked_as_the_whole(secrets: list[str], text: str, start: int) -> None:
    """Masking a suffix of a text gives a suffix of the masked text."""
    masker = Masker(secrets)
    assert masker.mask(text.encode()).endswith(masker.mask(text.encode(), min(start, len(text))))


class Flaky:
    """A store whose puts fail at random, before or after they took effect."""

    def __init__(self, inner: ObjectStore, rng: random.Random) -> None:
        self.inner = inner
        self.rng = rng
        self.seen: dict[str, bytes] = {}

    def put(self, key: str, body: bytes) -> None:
        chance = self.rng.random()
        if chance < 0.2:
            raise ConnectionError("the put failed before it took effect")
        assert self.seen.setdefault(key, body) == body, "a segment was overwritten with other content"
        self.inner.put(key, body)
        if chance < 0.4:
            raise ConnectionError("the put failed after it took effect")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(values, st.lists(texts, max_size=8), st.integers(0, 1 << 30), st.booleans())
def test_what_arrives_is_the_masked_whole(
    tmp_path_factory: pytest.TempPathFactory, secrets: list[str], pieces: list[str], seed: int, separate: bool
) -> None:
    """However output grows, puts fail and agents restart, the segments contain the masked output exactly once."""
    root = tmp_path_factory.mktemp("ship")
    rng = random.Random(seed)
    run = run_folder(root)
    if separate:
        run.errors.touch()
    store = Flaky(open_store(f"file://{root}/bucket"), rng)
    stream = LogStream(run, lambda: store, Masker(secrets), SETTINGS)  # type: ignore[arg-type,return-value]
    written = {run.output: b"", run.errors: b""}

    def ship(*, final: bool) -> None:
        nonlocal stream
        try:
            stream.ship(final=final)
        except ConnectionError:
            if rng.random() < 0.5:
                stream = LogStream(run, lambda: store, Masker(secrets), SETTINGS)  # type: ignore[arg-type,return-value]

    for piece in pieces:
        path = rng.choice([run.output, run.errors]) if separate else run.output
        with path.open("ab") as file:
            file.write(piece.encode())
        written[path] += piece.encode()
        for _ in range(rng.randrange(4)):
            ship(final=False)
    while not stream.done:
        ship(final=True)
    text, complete = read_log(f"file://{root}/bucket", log_prefix(run.workload_id, 1, "main", 0))
    assert complete and shipped(run)
    found = {TaskOutput.BOTH: b"", TaskOutput.STDOUT: b"", TaskOutput.STDERR: b""}
    for key, body in store.seen.items():
        if (segment := segment_of(key.rpartition("/")[2])) is not None:
            assert text[segment.offset :].startswith(body)
            found[segment.output] += body
    assert len(text) == sum(map(len, found.values()))
    stdout, stderr = (Masker(secrets).mask(written[path]) for path in (run.output, run.errors))
    assert found == {
        TaskOutput.BOTH: b"" if separate else stdout, TaskOutput.STDOUT: stdout if separate else b"",
        TaskOutput.STDERR: stderr,
    }  # fmt: skip


def test_of_two_files_the_older_output_comes_first(tmp_path: Path) -> None:
    """Segments of stdout and stderr follow each other in the order of their last output, each with whole lines."""
    run = run_folder(tmp_path)
    run.errors.touch()
    stream = stream_of(run, tmp_path)
    for at, path, text in ((1, run.errors, b"warn\n"), (2, run.output, b"out\nhalf"), (3, run.errors, b"Error\n")):
        with path.open("ab") as file:
            file.write(text)
        os.utime(path, (at, at))
        stream.ship(final=False)
    stream.ship(final=True)
    assert segments(tmp_path) == [b"warn\n", b"out\n", b"half", b"Error\n", b""]


def stream_of(run: RunFolder, root: Path, *secrets: str) -> LogStream:
    return LogStream(run, lambda: open_store(f"file://{root}/bucket"), Masker(secrets), SETTINGS)


def segments(root: Path) -> list[bytes]:
    store = open_store(f"file://{root}/bucket")
    return [store.get(info.key) for info in store.list("logs/")]


def test_segments_end_with_whole_lines(tmp_path: Path) -> None:
    """Segments end with whole lines; an incomplete line is shipped only if it has not grown since the previous call."""
    run = run_folder(tmp_path)
    stream = stream_of(run, tmp_path)
    run.output.write_bytes(b"one\ntwo\nthr")
    assert not stream.ship(final=False)
    assert segments(tmp_path) == [b"one\ntwo\n"]
    stream.ship(final=False)
    assert segments(tmp_path) == [b"one\ntwo\n", b"thr"]


def test_much_output_is_shipped_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ship` returns true while output for another segment is waiting; segments stay below the maximum size."""
    monkeypatch.setattr(output_file, "MAX_SEGMENT_BYTES", 1000)
    run = run_folder(tmp_path)
    stream = stream_of(run, tmp_path, "secret")
    text = b"0123456789\n" * 500 + b"x" * 3000 + b"secret" + b"y" * 3000
    run.output.write_bytes(text)
    while stream.ship(final=False):
        pass
    while stream.ship(final=True):
        pass
    assert b"".join(segments(tmp_path)) == text.replace(b"secret", b"***")
    assert max(map(len, segments(tmp_path))) <= 1010
    assert stream.done


def test_a_secret_split_over_writes_is_masked(tmp_path: Path) -> None:
    """The beginning of a secret value is held back until the following output shows whether it is that value."""
    run = run_folder(tmp_path)
    stream = stream_of(run, tmp_path, "hunter2")
    for piece in (b"password: hun", b"ter2 and hunt"):
        with run.output.open("ab") as file:
            file.write(piece)
        for _ in range(3):
            stream.ship(final=False)
    assert b"".join(segments(tmp_path)) == b"password: *** and "
    while stream.ship(final=True):
        pass
    assert b"".join(segments(tmp_path)) == b"password: *** and hunt"


def test_a_value_that_overlaps_itself_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TaskOutput that only repeats one value and is larger than a segment is shipped as masks, without the value."""
    monkeypatch.setattr(output_file, "MAX_SEGMENT_BYTES", 100)
    run = run_folder(tmp_path)
    stream = stream_of(run, tmp_path, "aaa")
    run.output.write_bytes(b"a" * 1000)
    for _ in range(30):
        stream.ship(final=True)
    assert stream.done
    assert set(b"".join(segments(tmp_path))) <= {ord("*"), ord("a")}
    assert b"".join(segments(tmp_path)).count(b"a") < 3


def test_the_lines_of_a_key_are_masked_one_by_one(tmp_path: Path) -> None:
    """Each line of a secret of several lines is masked, even if the lines are printed separately."""
    masker = Masker(["-----BEGIN\nMIIEpAIBAAKCAQEA\nx\n"])
    assert masker.mask(b"> MIIEpAIBAAKCAQEA\n> x\n") == b"> ***\n> x\n"


def test_truncated_output_goes_on(tmp_path: Path) -> None:
    """If a task truncates its own output, everything that it prints afterwards is shipped."""
    run = run_folder(tmp_path)
    stream = stream_of(run, tmp_path)
    run.output.write_bytes(b"before\n" * 3)
    stream.ship(final=False)
    run.output.write_bytes(b"after\n")
    while stream.ship(final=True):
        pass
    assert b"".join(segments(tmp_path)) == b"before\n" * 3 + b"after\n"


class Away:
    """A store that is unavailable at first: its puts fail, or block until it is available."""

    def __init__(self, inner: ObjectStore, *, waits: bool = False) -> None:
        self.inner = inner
        self.back = threading.Event()
        self.waits = waits

    def put(self, key: str, body: bytes) -> None:
        if not self.back.is_set() and not (self.waits and self.back.wait(30)):
            raise ConnectionError("the bucket is unavailable")
        self.inner.put(key, body)


BOUND = 1 << 22
LINE = b"0123456789 hunter2\n"


def on_disk(run: RunFolder) -> int:
    return run.output.stat().st_blocks * 512


def ship_all(stream: LogStream) -> None:
    while not stream.done:
        stream.ship(final=True)


@pytest.mark.rotating
def test_output_that_was_shipped_leaves_the_disk(tmp_path: Path) -> None:
    """A task that prints for a long time keeps little output on its machine, and all of it is in the bucket."""
    run = run_folder(tmp_path)
    stream = stream_of(run, tmp_path, "hunter2")
    written = 0
    with run.output.open("ab", buffering=0) as output:
        while written < 3 * BOUND:
            written += output.write(LINE * 50_000)
            while stream.ship(final=False):
                pass
            stream.bound(BOUND)
            assert on_disk(run) <= BOUND
    ship_all(stream_of(run, tmp_path, "hunter2"))
    assert b"".join(segments(tmp_path)) == LINE.replace(b"hunter2", b"***") * (written // len(LINE))


@pytest.mark.rotating
def test_a_log_has_a_limit_and_keeps_its_end(tmp_path: Path) -> None:
    """A task that prints without limit does not fill the bucket; its last output is stored after its end."""
    run, limit = run_folder(tmp_path), 4 << 20

    def new() -> LogStream:
        return LogStream(run, lambda: open_store(f"file://{tmp_path}/bucket"), Masker(["hunter2"]), SETTINGS, limit)

    stream = new()
    with run.output.open("ab", buffering=0) as output:
        for number in range(40):
            output.write(LINE * 50_000)
            while stream.ship(final=False):
                pass
            stream.bound(BOUND if number < 20 else 64 << 20)
            if number % 10 == 5:
                stream = new()
        assert sum(map(len, segments(tmp_path))) <= limit + MAX_SEGMENT_BYTES
        output.write(b"killed\n")
    ship_all(stream)
    before, missing, after = b"".join(segments(tmp_path)).partition(MISSING)
    assert missing and before.endswith(b"***\n") and limit <= len(before) <= limit + MAX_SEGMENT_BYTES
    assert after.endswith(b"***\nkilled\n") and MISSING not in after and 4 << 20 < len(after) <= 8 << 20


@pytest.mark.parametrize("pending", [0, 20 * len(LINE)])
def test_output_that_cannot_be_shipped_is_bounded(tmp_path: Path, pending: int) -> None:
    """While the bucket is unavailable, the oldest output is dropped, at any byte.

    The log reports the gap once, and no part of a secret is visible at its edge.
    """
    run = run_folder(tmp_path)
    store = Away(open_store(f"file://{tmp_path}/bucket"))

    def new() -> LogStream:
        return LogStream(run, lambda: store, Masker(["hunter2"]), SETTINGS)  # type: ignore[arg-type,return-value]

    stream = new()
    with run.output.open("ab", buffering=0) as output:
        output.write(LINE * (pending // len(LINE)))
        with pytest.raises(ConnectionError):
            stream.ship(final=True)
        for piece in range(9):
            output.write(LINE * 100_000 + b"x" * piece)
            stream.bound(BOUND)
            assert on_disk(run) <= BOUND
            if piece == 4:
                stream = new()
    store.back.set()
    ship_all(stream)
    masked = LINE.replace(b"hunter2", b"***")
    before, missing, after = b"".join(segments(tmp_path)).partition(MISSING)
    assert (before, missing) == (masked * (pending // len(LINE)), MISSING)
    assert MISSING not in after and BOUND // 4 < len(after) < BOUND
    head, *whole, end = after.split(b"\n")
    assert head in (masked[i:-1] for i in range(len(masked))) or head.startswith(b"***"), head
    assert {line.lstrip(b"x") for line in whole} == {masked[:-1]} and end == b"x" * 8


@pytest.mark.parametrize("offset", range(len(LINE)))
def test_what_begins_in_the_gap_is_masked_to_its_end(tmp_path: Path, offset: int) -> None:
    """Wherever in a secret the gap ends, no part of the secret is shipped."""
    run = run_folder(tmp_path)
    stream = stream_of(run, tmp_path, "hunter2")
    run.output.write_bytes(LINE * 300_000 + b"x" * offset)
    stream.bound(BOUND)
    ship_all(stream)
    text = b"".join(segments(tmp_path)).removeprefix(MISSING)
    assert not any(b"hunter2"[-size:] in text for size in range(3, 8)), text[:40]


async def test_a_put_that_hangs_does_not_keep_output_from_being_bounded(tmp_path: Path) -> None:
    """The bound on disk usage holds while a put hangs."""
    run = run_folder(tmp_path)
    store = Away(open_store(f"file://{tmp_path}/bucket"), waits=True)
    run.output.write_bytes(LINE * 500_000)
    tasks.request_stop(run, 0, told=True)
    with ThreadPoolExecutor(1) as threads:
        shipping = Shipping(threads, BOUND)
        shipping.watch(run, lambda: store, Masker([]), SETTINGS)  # type: ignore[arg-type,return-value]
        try:
            async with asyncio.timeout(20):
                while on_disk(run) > BOUND + (2 << 20):
                    await asyncio.sleep(0.05)
                store.back.set()
                while not shipped(run):
                    await asyncio.sleep(0.05)
        finally:
            store.back.set()
            await shipping.close()
    assert MISSING in b"".join(segments(tmp_path))


async def test_a_stream_that_ended_before_it_is_bounded_is_forgotten_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that bounds the output starts late: the runs that it is to bound have ended, one folder is removed."""
    loop, held, back = asyncio.get_running_loop(), threading.Event(), threading.Event()
    store, masker = open_store(f"file://{tmp_path}/bucket"), Masker([])
    kept = weakref.ref(masker)

    def opened() -> ObjectStore:
        back.wait()
        return store

    runs = [RunFolder(tmp_path / f"{k}", f"wl-a-{k}", 1, "main", 0) for k in range(2)]
    with ThreadPoolExecutor(1) as threads, ThreadPoolExecutor(1) as late:
        loop.set_default_executor(late)
        shipping = Shipping(threads, 0)
        loop.run_in_executor(None, held.wait)
        for run in runs:
            run.path.mkdir()
            run.output.write_bytes(LINE * 10_000)
            tasks.request_stop(run, 0, told=True)
            shipping.watch(run, opened, masker, SETTINGS, removes=run is runs[0])
        async with asyncio.timeout(30):
            while late._work_queue.qsize() == 0:
                await asyncio.sleep(0.05)
            back.set()
            while not shipped(runs[1]) or runs[0].path.exists():
                await asyncio.sleep(0.05)
            held.set()
            await asyncio.to_thread(int)
            del masker
            while kept() is not None:
                gc.collect()
                await asyncio.sleep(0.05)
        await shipping.close()
    assert caplog.messages == []


def test_a_folder_that_is_removed_while_its_output_is_bounded_is_no_error(tmp_path: Path) -> None:
    """The file with the output comes and goes in another thread."""
    run, ends = run_folder(tmp_path), threading.Event()

    def removes() -> None:
        while not ends.is_set():
            run.output.touch()
            run.output.unlink()

    with ThreadPoolExecutor(1) as threads:
        removing = threads.submit(removes)
        try:
            for _ in range(20_000):
                bound([(run, lambda: stream_of(run, tmp_path))], BOUND)
        finally:
            ends.set()
        removing.result()


async def test_elements_of_a_runner_share_the_limit_of_a_task(tmp_path: Path) -> None:
    """While a put hangs, the elements of a runner together have the disk space of one task; the newest output is kept,
    that of elements whose uploads wait for the one that hangs, too.
    """
    runs = []
    for k in range(6):
        run = RunFolder(tmp_path / "elements" / f"{k}.1", f"wl-a-{k}", 1, "main", 0)
        run.path.mkdir(parents=True)
        run.output.write_bytes(LINE * 100_000)
        os.utime(run.output, (1000.0 + k, 1000.0 + k))
        tasks.request_stop(run, 0, told=True)
        runs.append(run)
    store = Away(open_store(f"file://{tmp_path}/bucket"), waits=True)
    with ThreadPoolExecutor(1) as threads:
        shipping = Shipping(threads, BOUND)
        try:
            for run in runs:
                shipping.watch(run, lambda: store, Masker([]), SETTINGS, removes=True)  # type: ignore[arg-type,return-value]
            async with asyncio.timeout(30):
                while sum(map(on_disk, runs)) > BOUND + (2 << 20):
                    await asyncio.sleep(0.05)
                assert on_disk(runs[-1]) >= 100_000 * len(LINE)
                store.back.set()
                while any(run.path.exists() for run in runs):
                    await asyncio.sleep(0.05)
        finally:
            store.back.set()
            await shipping.close()
    logs = [read_log(f"file://{tmp_path}/bucket", log_prefix(f"wl-a-{k}", 1, "main", 0))[0] for k in range(6)]
    assert [MISSING in log for log in logs] == [True] * 4 + [False] * 2
    assert logs[-1] == LINE * 100_000


def test_no_output_has_an_end(tmp_path: Path) -> None:
    """The log of a task that printed nothing, or never started, has only the end marker."""
    run = run_folder(tmp_path)
    tasks.request_stop(run, 0, told=True)
    stream_of(run, tmp_path).ship(final=True)
    assert read_log(f"file://{tmp_path}/bucket", log_prefix(run.workload_id, 1, "main", 0)) == (b"", True)
