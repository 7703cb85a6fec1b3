"""Outputs of ended tasks: what is stored and what is not, as which user, and after errors and kills."""

import asyncio
import io
import os
import tarfile
import threading
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.launch import Owner
from agent.output_storage import OutputStorage, is_stored
from agent.tasks import RunFolder
from domain import ids
from domain.output_manifest import PART_BYTES, OutputManifest
from domain.protocol.machines import NodeOutcome
from domain.task_reports import UnstoredOutput
from mizzen.objects.files import FileStore
from mizzen.objects.store import Body
from tests.agent.harness import Lab, description, run_folder, until_async

LIMITS = (1 << 30, 100)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A task with a folder `out` in its working directory."""
    found = run_folder(tmp_path / "attempt")
    (found.work / "out").mkdir()
    return found


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    """The bucket of the region."""
    return FileStore(tmp_path / "bucket")


@pytest.fixture
async def storage() -> AsyncIterator[OutputStorage]:
    """What stores outputs."""
    opened = OutputStorage(*LIMITS)
    yield opened
    await opened.close()


def place(run: RunFolder, name: str = "model") -> tuple[str, int, str, int, str]:
    """Returns what identifies an output in the functions of `domain.ids`."""
    return run.workload_id, run.attempt, run.job, run.task, name


def manifest(store: FileStore, run: RunFolder, name: str = "model") -> OutputManifest:
    """Returns the manifest of an output."""
    return OutputManifest.model_validate_json(store.get(ids.output_manifest_key(*place(run, name))))


def archive(store: FileStore, run: RunFolder, name: str = "model") -> dict[str, bytes | str | None]:
    """Returns the stored entries: the content of files, the target of links, None for folders."""
    parts = manifest(store, run, name).parts
    assert all(part.size_bytes == PART_BYTES for part in parts[:-1])
    body = b"".join(store.get(ids.output_part_key(*place(run, name), number)) for number in range(len(parts)))
    found: dict[str, bytes | str | None] = {}
    with tarfile.open(fileobj=io.BytesIO(body)) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isfile() else None
            found[member.name] = file.read() if file else member.linkname or None
    return found


async def stored(
    storage: OutputStorage, store: FileStore, run: RunFolder, outputs: Mapping[str, str], owner: Owner | None = None
) -> list[UnstoredOutput]:
    """Stores the outputs of a run; returns those that were not stored."""
    storage.watch(run, outputs, lambda: store, owner)
    await storage.until_stored([run])
    assert is_stored(run)
    return storage.unstored(run)


async def test_what_is_stored(run: RunFolder, store: FileStore, storage: OutputStorage) -> None:
    """Files in several parts, folders and links in the output. What leads out of it or is no file is named."""
    out = run.work / "out"
    (out / "deep").mkdir()
    large = os.urandom(2 * PART_BYTES + 5)
    (out / "deep" / "w.pt").write_bytes(large)
    (out / "run.sh").write_text("true")
    (out / "run.sh").chmod(0o4755)
    (out / "last").symlink_to("deep/w.pt")
    (out / "absolute").symlink_to(out / "deep")
    (out / "deep" / "up").symlink_to("../run.sh")
    (out / "leak").symlink_to("/etc/passwd")
    (out / "cache").symlink_to("../cache")
    os.mkfifo(out / "pipe")
    (run.work / "report.txt").write_text("fine")
    assert await stored(storage, store, run, {"model": "out", "report": "report.txt"}) == []
    assert archive(store, run, "report") == {"report.txt": b"fine"}
    assert archive(store, run) == {
        "deep": None, "deep/w.pt": large, "deep/up": "../run.sh", "run.sh": b"true", "last": "deep/w.pt",
        "absolute": "deep",
    }  # fmt: skip
    found = manifest(store, run)
    assert (found.files, found.size_bytes, found.left_out_count) == (6, len(large) + 4, 3)
    assert found.left_out == [
        "cache: is a link to ../cache, which is not in the output",
        "leak: is a link to /etc/passwd, which is not in the output",
        "pipe: is not a file, a folder or a link",
    ]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("none", "none does not exist"),
        ("none/at/all", "none/at/all does not exist"),
        ("link", "link is a link or a special file; an output must be a file or a folder"),
        ("link/passwd", "link/passwd is a link, or below a link or a file; an output must be a file or a folder"),
        ("out/file/x", "out/file/x is a link, or below a link or a file; an output must be a file or a folder"),
    ],
)
async def test_paths_that_are_not_stored(
    run: RunFolder, store: FileStore, storage: OutputStorage, path: str, why: str
) -> None:
    """The message says why. No link on the way is followed."""
    (run.work / "link").symlink_to("/etc")
    (run.work / "out" / "file").write_text("x")
    assert await stored(storage, store, run, {"model": path}) == [UnstoredOutput("model", why, "none" in path)]
    assert [info.key for info in store.list(ids.outputs_prefix(run.workload_id)) if "/parts/" in info.key] == []


async def test_too_large_outputs_name_the_limit_and_the_largest_entries(run: RunFolder, store: FileStore) -> None:
    """Nothing of them is stored. A sparse file counts with its size."""
    for name, size in (("small", 10), ("large", 3 << 20)):
        with (run.work / "out" / name).open("wb") as file:
            file.truncate(size)
    few, small = OutputStorage(1 << 30, 1), OutputStorage(1 << 20, 100)
    (by_count,) = await stored(few, store, run, {"model": "out"})
    assert by_count.why == "out has more than 1 files and folders, the limit"
    (run.path / "outputs.json").unlink()
    store.delete(ids.output_manifest_key(*place(run)))
    (by_size,) = await stored(small, store, run, {"model": "out"})
    assert by_size.why == (
        "out has 3.0 MiB, more than the limit of 1.0 MiB; the largest: large (3.0 MiB), small (0.0 MiB)"
    )
    assert manifest(store, run).error == by_size.why and manifest(store, run).parts == []
    await few.close()
    await small.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can read as another user")
async def test_files_are_read_as_the_user_of_the_task(
    run: RunFolder, store: FileStore, storage: OutputStorage, tmp_path: Path
) -> None:
    """A file that only the agent's user may read is left out, also by a hard link that the task has made."""
    for folder in (tmp_path, *tmp_path.parents[:-1]):
        if folder.stat().st_uid == 0 and len(folder.parts) > 2:
            folder.chmod(folder.stat().st_mode | 0o011)
    uid = 2_345_678
    secret = tmp_path / "key"
    secret.write_text("secret")
    secret.chmod(0o600)
    own = run.work / "out" / "own"
    own.write_text("mine")
    own.chmod(0o600)
    for path in (run.work, run.work / "out", own):
        os.chown(path, uid, uid)
    os.link(secret, run.work / "out" / "linked")
    assert await stored(storage, store, run, {"model": "out"}, Owner(uid, uid, ())) == []
    assert archive(store, run) == {"own": b"mine"}
    assert manifest(store, run).left_out == ["linked: Permission denied"]


class _Slow(FileStore):
    """A store that waits in `put` for each part, and fails while `fails`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Semaphore(0)
        self.puts = 0
        self.fails = False

    def put(self, key: str, body: Body) -> None:
        """See `FileStore`."""
        self.puts += 1
        if self.fails:
            raise OSError("no route to host")
        if "/parts/" in key:
            self.gate.acquire()
        super().put(key, body)


async def test_an_agent_that_ends_leaves_no_half_output(run: RunFolder, tmp_path: Path) -> None:
    """The manifest is missing while parts are stored; the next agent stores all of the output."""
    (run.work / "out" / "w").write_bytes(os.urandom(3 * PART_BYTES))
    store = _Slow(tmp_path / "bucket")
    first, second = OutputStorage(*LIMITS), OutputStorage(*LIMITS)
    first.watch(run, {"model": "out"}, lambda: store, None)
    store.gate.release()
    await until_async(lambda: store.puts == 2)
    ending = asyncio.create_task(first.close())
    store.gate.release()
    await ending
    assert list(store.list(ids.output_manifests_prefix(run.workload_id))) == []
    assert not is_stored(run)
    for _ in range(10):
        store.gate.release()
    assert await stored(second, store, run, {"model": "out"}) == []
    assert archive(store, run).keys() == {"w"}
    await second.close()


async def test_a_bucket_that_fails_is_tried_again(run: RunFolder, tmp_path: Path, storage: OutputStorage) -> None:
    """Who waits for the outputs does not wait for ever, and gets the reason; later they are stored."""
    (run.work / "out" / "w").write_bytes(b"x")
    store = _Slow(tmp_path / "bucket")
    store.fails = True
    storage.watch(run, {"model": "out"}, lambda: store, None)
    await until_async(lambda: store.puts)
    assert storage.unstored(run) == []
    began_s = time.monotonic()
    await storage.until_stored([run], patience_s=0.1)
    assert time.monotonic() - began_s < 20
    assert not is_stored(run)
    late = "it could not be uploaded yet, and the agent keeps trying: no route to host"
    await until_async(lambda: storage.unstored(run) == [UnstoredOutput("model", late)])
    store.fails = False
    store.gate.release()
    await storage.until_stored([run])
    assert archive(store, run) == {"w": b"x"}


async def test_the_last_attempt_wins(run: RunFolder, store: FileStore, storage: OutputStorage, tmp_path: Path) -> None:
    """What an attempt stores replaces what earlier ones have stored; what it does not store replaces nothing."""

    def attempt(number: int) -> RunFolder:
        path = tmp_path / str(number) / "main.0"
        (path / "work").mkdir(parents=True)
        return RunFolder(path, run.workload_id, number, run.job, run.task)

    attempts = [attempt(number) for number in (9, 10, 11)]
    for one in attempts[:2]:
        (one.work / "out").write_text(str(one.attempt))
    for one in attempts:
        assert bool(await stored(storage, store, one, {"model": "out"})) is (one.attempt == 11)
    assert archive(store, attempts[1]) == {"out": b"10"}
    keys = {info.key.removeprefix(ids.outputs_prefix(run.workload_id)) for info in store.list("outputs/")}
    assert keys == {"manifests/main/0/model/10.json", "parts/main/0/model/10/000000"}


async def test_a_file_that_changes_meanwhile(
    run: RunFolder, tmp_path: Path, storage: OutputStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that shrinks while it is stored is read again from the beginning."""
    monkeypatch.setattr("agent.output_storage._TRIES", 2)
    file = run.work / "out" / "w"
    file.write_bytes(os.urandom(4 * PART_BYTES))
    store = _Slow(tmp_path / "bucket")
    task: Any = asyncio.create_task(stored(storage, store, run, {"model": "out"}))
    await until_async(lambda: store.puts == 1)
    os.truncate(file, 10)
    for _ in range(20):
        store.gate.release()
    assert await task == []
    assert len(archive(store, run)["w"] or b"") == 10


async def test_outputs_of_isolated_tasks(lab: Lab) -> None:
    """They are stored when the activity returns; what a task has linked outside of its folder is not in them."""
    config = lab.config()
    script = "umask 077; mkdir out; echo w > out/w; ln -s /etc/passwd out/leak"
    launch = description(lab.region, config, script, outputs={"model": "out", "none": "none"})
    lab.write(launch)
    async with lab.agent(config):
        found: NodeOutcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
        run = lab.folder_of(launch, config)
        assert archive(FileStore(lab.folder / "bucket"), run)["w"] == b"w\n"
    assert found.progress[0].unstored == [UnstoredOutput("none", "none does not exist", is_missing=True)]
    assert manifest(FileStore(lab.folder / "bucket"), run).left_out == [
        "leak: is a link to /etc/passwd, which is not in the output"
    ]


async def test_outputs_of_a_stopped_task_are_stored_later(lab: Lab) -> None:
    """The stop does not wait for them. An agent that starts again stores those of attempts that have ended."""
    config = lab.config()
    launch = description(lab.region, config, "echo w > out; echo ready; sleep 600", outputs={"model": "out"})
    lab.write(launch)
    run, store = lab.folder_of(launch, config), FileStore(lab.folder / "bucket")
    async with lab.agent(config):
        running = await lab.run(launch, config.machine)
        await until_async(lambda: run.output.exists() and b"ready" in run.output.read_bytes())
        await lab.stop(launch, config.machine, 5.0)
        await running.result(NodeOutcome)
        await until_async(lambda: is_stored(run))
    (run.path / "outputs.json").unlink()
    store.delete(ids.output_manifest_key(*place(run)))
    async with lab.agent(config):
        await until_async(lambda: is_stored(run))
    assert archive(store, run) == {"out": b"w\n"}
