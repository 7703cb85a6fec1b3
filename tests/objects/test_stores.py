"""Behaviour that all kinds of stores share, and behaviour of stores in folders."""

import errno
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mizzen.objects import MissingObject, ObjectStore, disk, files, open_store
from mizzen.objects.disk import in_memory

BAD_KEYS = ["", "/etc/passwd", "a/../../b", "..", "a//b", "./a", "a/", "nul\0"]


def test_a_store_draws_nothing_from_the_shared_generator(store: ObjectStore, tmp_path: Path) -> None:
    """Operations of a store do not change the state of Python's global random generator."""
    before = random.getstate()
    store.put("a", [b"some", b"body"])
    (tmp_path / "body").write_bytes(b"of a file")
    store.put("b", tmp_path / "body")
    assert store.create("c", b"once") and store.get("c") == b"once"
    store.delete("a")
    assert random.getstate() == before


def test_what_is_put_is_got(store: ObjectStore, tmp_path: Path) -> None:
    """`get` returns the bytes or the file content that was put, and a second put replaces the first."""
    body = random.Random(1).randbytes(200_000)
    path = tmp_path / "body"
    path.write_bytes(body)
    store.put("a/b", b"first")
    store.put("a/b", b"second")
    store.put("a/c", path)
    assert store.get("a/b") == b"second"
    assert store.get("a/c") == body
    assert store.size("a/c") == len(body)


def test_buffers_are_put_one_after_the_other(store: ObjectStore) -> None:
    """A body of several buffers is their concatenation; without buffers the object is empty."""
    big = random.Random(3).randbytes(9 << 20)
    store.put("big", [b"", b"head", memoryview(big), bytearray(b"tail")])
    assert store.get("big") == b"head" + big + b"tail"
    store.put("small", [b"a", memoryview(b"bc")])
    assert store.get("small") == b"abc"
    store.put("none", [])
    assert store.get("none") == b""


def test_what_is_fetched_fills_the_buffer(store: ObjectStore) -> None:
    """`fetch` fills the buffer from a position on and returns the count; the rest of the buffer is unchanged."""
    store.put("x", b"0123456789")
    into = memoryview(bytearray(b"." * 4))
    with store.opened("x") as fetch:
        assert fetch(into, 0) == 4
        assert fetch(into[1:], 8) == 2
        assert into.tobytes() == b"089" + b"3"
        assert fetch(into, 10) == 0
        assert fetch(into[:0], 0) == 0
    with pytest.raises(MissingObject, match="no/such"), store.opened("no/such") as fetch:
        fetch(into, 0)


@pytest.mark.parametrize("cached", [True, False])
def test_what_is_not_in_memory_is_read_by_one_thread_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    """Threads read cached pages of a file concurrently, and pages that are on the disk one after the other."""
    body = random.Random(5).randbytes(1 << 20)
    (tmp_path / "x").write_bytes(body)
    content, piece_bytes = memoryview(bytearray(len(body))), 64 << 10
    reading, most = [0], [0]
    together = threading.Barrier(2)

    def preadv(descriptor: int, into: list[memoryview], start: int) -> int:
        reading[0] += 1
        most[0] = max(most[0], reading[0])
        if cached:
            together.wait(20)
        time.sleep(0.001)
        got = os.pread(descriptor, len(into[0]), start)
        into[0][: len(got)] = got
        reading[0] -= 1
        return len(got)

    monkeypatch.setattr(files, "in_memory", lambda *_: cached)
    monkeypatch.setattr(os, "preadv", preadv)
    with open_store(tmp_path.as_uri()).opened("x") as fetch, ThreadPoolExecutor(8) as pool:
        fetched = [
            pool.submit(fetch, content[low : low + piece_bytes], low) for low in range(0, len(body), piece_bytes)
        ]
        assert [done.result() for done in fetched] == [piece_bytes] * len(fetched)
    assert content == body
    assert most[0] > 1 if cached else most[0] == 1


def test_what_is_not_in_memory_is_read_in_the_order_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads from the disk keep the order of the requests, even if read-ahead caches later pages meanwhile."""
    piece_bytes, pieces = 4096, 64
    (tmp_path / "x").write_bytes(bytes(piece_bytes * pieces))
    read: list[int] = []
    reading, most = [0], [0]

    def preadv(descriptor: int, into: list[memoryview], start: int) -> int:
        read.append(start)
        reading[0] += 1
        most[0] = max(most[0], reading[0])
        time.sleep(0.002)
        reading[0] -= 1
        return len(into[0])

    monkeypatch.setattr(files, "in_memory", lambda _, start: start > 0)
    monkeypatch.setattr(os, "preadv", preadv)
    with open_store(tmp_path.as_uri()).opened("x") as fetch, ThreadPoolExecutor(8) as pool:
        asked = []
        for start in range(0, piece_bytes * pieces, piece_bytes):
            asked.append(pool.submit(fetch, memoryview(bytearray(piece_bytes)), start))
            time.sleep(0.001)
        for done in asked:
            done.result()
    assert read == sorted(read)
    assert most[0] == 1


@pytest.mark.parametrize("chunk_bytes", [10 << 20, 16 << 20, 50 << 20])
def test_the_disk_writes_while_a_body_of_any_chunks_is_still_copied(
    chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this, all of the file waits for the fsync: in chunks of 10 MiB, a gang's save took half as long again."""
    begun: list[tuple[int, int]] = []
    monkeypatch.setattr(disk, "_begin_writeback", lambda _, start, count: begun.append((start, count)))
    open_store(tmp_path.as_uri()).put("state", [bytes(chunk_bytes)] * (100 * 2**20 // chunk_bytes))
    at = 0
    for start, count in begun:
        assert start == at and count < 32 << 20
        at += count
    assert at > 80 << 20


def test_memory_of_a_file_is_guessed_where_the_system_cannot_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was just written is cached. If the system cannot tell, it is assumed to be cached."""
    (tmp_path / "x").write_bytes(b"1" * 100)
    with (tmp_path / "x").open("rb") as file:
        assert in_memory(file.fileno(), 0)
        assert in_memory(file.fileno(), 100)
        for error, expected in ((BlockingIOError(), False), (OSError(errno.EOPNOTSUPP, "no"), True)):

            def refuse(*_: object, error: OSError = error) -> int:
                raise error

            monkeypatch.setattr(os, "preadv", refuse)
            assert in_memory(file.fileno(), 0) is expected
        monkeypatch.delattr(os, "RWF_NOWAIT")
        assert in_memory(file.fileno(), 0)


def test_only_one_creates(store: ObjectStore, request: pytest.FixtureRequest) -> None:
    """If several threads create an object concurrently, exactly one succeeds, and its content is stored."""
    if request.node.callspec.params["store"] == "gcs":
        pytest.skip("the emulator does not enforce ifGenerationMatch")
    bodies = [f"by {n}".encode() for n in range(8)]
    made: list[bytes] = []
    ready = threading.Barrier(len(bodies))

    def create(body: bytes) -> None:
        ready.wait()
        if store.create("log/7", body):
            made.append(body)

    threads = [threading.Thread(target=create, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [store.get("log/7")]
    assert not store.create("log/7", b"later")
    assert store.create("log/7", made[0]), "a repeated create with the same content failed"
    assert [info.key for info in store.list("")] == ["log/7"]


def test_ranges_are_clipped(store: ObjectStore) -> None:
    """The end of a range is exclusive and is limited to the object's size; a range beyond it is empty."""
    store.put("x", b"0123456789")
    store.put("empty", b"")
    assert store.get_range("x", 2, 5) == b"234"
    assert store.get_range("x", 8, 100) == b"89"
    assert store.get_range("x", 10, 20) == b""
    assert store.get_range("x", 3, 3) == b""
    assert store.get_range("empty", 0, 10) == b""


def test_absent_objects(store: ObjectStore) -> None:
    """Reading a missing object raises MissingObject with the key; deleting it does nothing."""
    store.delete("no/such")
    assert store.size("no/such") is None
    with pytest.raises(MissingObject, match="no/such"):
        store.get("no/such")
    with pytest.raises(MissingObject, match="no/such"):
        store.get_range("no/such", 0, 1)


def test_deleted_objects_are_gone(store: ObjectStore) -> None:
    """A deleted object cannot be read and is not listed; other objects stay."""
    store.put("a/b/c", b"1")
    store.put("a/d", b"2")
    store.delete("a/b/c")
    assert store.size("a/b/c") is None
    assert [info.key for info in store.list("")] == ["a/d"]


def test_what_is_forgotten_is_still_there(store: ObjectStore) -> None:
    """`forget` drops only the page cache: the object stays. A missing object is no error."""
    store.put("a", b"there")
    store.forget("a")
    store.forget("absent")
    assert store.get("a") == b"there"
    assert store.size("absent") is None


def test_listing_is_by_prefix_and_in_order(store: ObjectStore) -> None:
    """`list` returns the keys with any prefix, in the order of whole keys; `after` skips keys up to the given one."""
    keys = ["a-b", "a.b", "a/b", "a/b/c"[:3] + "-", "a/c/d", "ab", "logs/1/x", "logs/10/x", "logs/2"]
    for key in random.Random(2).sample(keys, len(keys)):
        store.put(key, key.encode())
    ordered = sorted(keys)
    assert [info.key for info in store.list("")] == ordered
    assert [(i.key, i.size_bytes) for i in store.list("logs/1")] == [("logs/1/x", 8), ("logs/10/x", 9)]
    assert [info.key for info in store.list("a/")] == [key for key in ordered if key.startswith("a/")]
    assert [info.key for info in store.list("nothing/here")] == []
    for after in ordered:
        assert [info.key for info in store.list("", after=after)] == [key for key in ordered if key > after]
        assert [i.key for i in store.list("a", after=after)] == [k for k in ordered if k > after and k[0] == "a"]


def test_the_tag_tells_a_replacement(store: ObjectStore) -> None:
    """The tag in a listing changes if the object is replaced."""
    store.put("x", b"one")
    (before,) = store.list("x")
    store.put("x", b"two")
    (after,) = store.list("x")
    assert before.tag != after.tag


def fetch_first(store: ObjectStore, key: str) -> int:
    """Returns the number of bytes that a fetch of one byte gets."""
    with store.opened(key) as fetch:
        return fetch(memoryview(bytearray(1)), 0)


def test_keys_stay_in_the_store(store: ObjectStore) -> None:
    """Absolute and empty keys, and keys with `..`, are errors of every method."""
    uses: list[Callable[[str], object]] = [
        store.get,
        store.size,
        store.delete,
        lambda key: store.put(key, b""),
        lambda key: store.create(key, b"x"),
        lambda key: fetch_first(store, key),
        lambda key: store.get_range(key, 0, 1),
    ]
    for use, key in itertools.product(uses, BAD_KEYS):
        with pytest.raises(ValueError, match="object key"):
            use(key)


def test_uris(store: ObjectStore, tmp_path: Path) -> None:
    """The URI of a prefix starts with the store's URL and ends with the prefix."""
    uri = store.uri("checkpoints/wl-1/")
    assert uri.endswith("/checkpoints/wl-1/")
    assert uri.startswith((f"{tmp_path.as_uri()}/bucket/", "s3://", "gs://"))


@pytest.mark.parametrize(
    "url", ["az://bucket", "gs:///x", "/a/folder", "file://host/folder", "file:relative", "s3:///x"]
)
def test_unknown_urls_are_refused(url: str) -> None:
    """An unsupported URL is a ValueError that has the URL."""
    with pytest.raises(ValueError, match=url.replace("/", ".")):
        open_store(url)


def test_concurrent_writers_never_show_a_mixture(tmp_path: Path) -> None:
    """While threads replace and delete an object, a reader gets one complete version or MissingObject."""
    store = open_store(f"file://{tmp_path}")
    versions = [bytes([n]) * 50_000 for n in range(4)]
    done = threading.Event()
    seen: set[bytes] = set()

    def read() -> None:
        while not done.is_set():
            try:
                seen.add(store.get("deep/down/x"))
            except MissingObject:
                continue

    def write(version: bytes) -> None:
        for _ in range(10):
            store.put("deep/down/x", version)
            store.delete("deep/down/x")

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(version,)) for version in versions]
    for thread in (reader, *writers):
        thread.start()
    for writer in writers:
        writer.join()
    done.set()
    reader.join()
    assert seen <= set(versions)
    assert list(store.list("")) == []


def test_an_object_and_a_folder_cannot_share_a_name(tmp_path: Path) -> None:
    """In a folder, a key cannot be below another object's key; the put is an error and changes nothing."""
    store = open_store(f"file://{tmp_path}")
    store.put("a", b"1")
    with pytest.raises(ValueError, match="the same name"):
        store.put("a/b", b"2")
    with pytest.raises(ValueError, match="the same name"):
        store.create("a/b", b"2")
    store.put("folder/x", b"1")
    with pytest.raises(ValueError, match="the same name"):
        store.create("folder", b"2")
    assert [info.key for info in store.list("")] == ["a", "folder/x"]


def test_a_folder_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without hard links, `create` still succeeds only once."""

    def link(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "hard links are not supported")

    monkeypatch.setattr(os, "link", link)
    store = open_store(f"file://{tmp_path}")
    assert store.create("log/1", b"first")
    assert not store.create("log/1", b"second")
    assert store.get("log/1") == b"first"


@pytest.mark.parametrize(("url", "library", "extra"), [("s3://b", "boto3", "s3"), ("gs://b", "google.cloud", "gcs")])
def test_a_library_that_is_not_there(url: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a cloud's library is missing, the error names the extra to install."""
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"mizzen.objects.{extra}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"mizzen\[{extra}\]"):
        open_store(url)


def test_what_dead_writers_staged_is_tidied(tmp_path: Path) -> None:
    """Tidying removes the staged files of killed writers, but not those of running ones."""
    store = open_store(f"file://{tmp_path}")
    store.tidy()
    begun, go_on = os.pipe(), os.pipe()

    def writer(dies: bool) -> int:
        pid = os.fork()
        if pid == 0:
            real = os.fsync

            def stop(descriptor: int) -> None:
                os.write(begun[1], b"x")
                if dies:
                    os.kill(os.getpid(), signal.SIGKILL)
                os.read(go_on[0], 1)
                real(descriptor)

            os.fsync = stop
            store.put("alive", b"body")
            os._exit(0)
        assert os.read(begun[0], 1) == b"x"
        return pid

    os.waitpid(writer(dies=True), 0)
    alive = writer(dies=False)
    assert len(list((tmp_path / ".staging").iterdir())) == 2
    store.tidy()
    assert len(list((tmp_path / ".staging").iterdir())) == 1
    os.write(go_on[1], b"x" * 100)
    assert os.waitpid(alive, 0)[1] == 0
    assert store.get("alive") == b"body"
    assert list((tmp_path / ".staging").iterdir()) == []
