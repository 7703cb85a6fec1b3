"""Tiers of checkpoints: trainings and memory servers are real processes that are killed, frozen and cut off."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mizzen.checkpoint import (
    Checkpointer,
    CheckpointError,
    CheckpointSettings,
    CheckpointWarning,
    StaleAttemptError,
    Tiers,
    list_committed,
)
from mizzen.memory import connection, wire
from mizzen.memory.memory_store import open_memory, token_of
from mizzen.objects.files import FileStore
from mizzen.objects.store import ObjectInfo
from tests.netns.namespaces import Network, why_not
from tests.sdk import memory_servers
from tests.sdk.scripts import SDK

STEPS, KILLED = 12, 7
SCRIPT = """
import hashlib, json, os, sys, time
import numpy as np
from mizzen.checkpoint import Checkpointer, CheckpointSettings, Tiers
root, options, killed = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
state, dice = {"w": np.zeros(50_000)}, np.random.default_rng(0)
checkpointer = Checkpointer(
    root, interval_s=0, background=bool(options.pop("background", False)), local=options.pop("local", None),
    settings=CheckpointSettings(tiers=Tiers(**options)),
)
checkpointer.track(state=state, dice=dice)
begin = checkpointer.restore()
for step in range(begin + 1, 13):
    time.sleep(0.02)
    state["w"] += dice.standard_normal(50_000)
    checkpointer.step(step)
    if step == killed:
        checkpointer.wait()
        checkpointer.step(step)  # Saves, if a background save of an earlier step was still running.
        checkpointer.wait()
        os.kill(os.getpid(), 9)
print(begin, hashlib.sha256(state["w"].tobytes() + str(dice.bit_generator.state).encode()).hexdigest())
"""


def _train(
    root: Path, machine: Path, killed: int = 0, before: tuple[str, ...] = (), **options: Any
) -> tuple[int, str, str]:
    """Trains in a process on a machine; returns the step at which it began, the digest of its end, and its warnings."""
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SDK), "MIZZEN_MEMORY_DIR": str(machine)}
    ended = subprocess.run(
        [*before, sys.executable, "-W", "always", "-c", SCRIPT, str(root), json.dumps(options), str(killed)],
        env=environ | {"MIZZEN_PLATFORM": "sigterm"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == (-signal.SIGKILL if killed else 0), ended.stderr
    begin, _, digest = ended.stdout.strip().partition(" ")
    return int(begin or -1), digest, ended.stderr


@pytest.fixture
def machines() -> Iterator[list[Path]]:
    """Three machines."""
    with memory_servers.machines("a", "b", "c") as made:
        yield made


@pytest.fixture
def whole(tmp_path: Path) -> str:
    """The digest of an uninterrupted training."""
    return _train(tmp_path / "whole", tmp_path, memory_bytes=0)[1]


def _hold(root: Path, machine: Path, address: str, before: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
    """Starts a memory server on a machine without a training, and returns when its address is published."""
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SDK), "MIZZEN_MEMORY_DIR": str(machine)}
    command = [*before, sys.executable, "-m", "mizzen.memory", str(root), "--address", address, "--idle-s", "300"]
    process = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
    end_s = time.monotonic() + 60
    while not list(root.glob("memory/servers/*")):
        assert process.poll() is None and time.monotonic() < end_s, process.communicate()
        time.sleep(0.05)
    return process


@pytest.mark.parametrize("background", [False, True])
def test_a_lost_process_continues_from_the_memory_of_its_machine(
    tmp_path: Path, machines: list[Path], whole: str, background: bool
) -> None:
    """The memory outlives `kill -9`. Nothing is read from the root's parts, which have an older step."""
    root = tmp_path / "root"
    _train(root, machines[0], KILLED, background=background)
    saved = list_committed(root)[0].step
    assert saved < KILLED
    begin, digest, warned = _train(root, machines[0], background=background)
    assert (saved < KILLED, begin, digest, warned) == (True, KILLED, whole, "")


@pytest.mark.rotating
def test_a_lost_machine_continues_from_the_memory_of_its_peer(tmp_path: Path, machines: list[Path], whole: str) -> None:
    """The first machine is cut off from the network with all its processes; a third one starts the training."""
    if reason := why_not():
        pytest.skip(reason)
    root, network = tmp_path / "root", Network("abc")
    try:
        where = {name: {"address": network.address(name), "before": tuple(network.enter(name))} for name in "abc"}
        holder = _hold(root, machines[1], **where["b"])
        _train(root, machines[0], KILLED, peers=True, **where["a"])
        network.cut("a")
        saved = list_committed(root)[0].step
        begin, digest, _ = _train(root, machines[2], peers=True, **where["c"])
        assert (saved < KILLED, begin, digest) == (True, KILLED, whole)
        holder.kill()
        holder.communicate()
    finally:
        network.remove()


def test_two_machines_are_peers_of_each_other(tmp_path: Path, machines: list[Path], whole: str) -> None:
    """Each keeps the parts of the other; after the loss of one, the other has the newest checkpoint."""
    root, options = tmp_path / "root", {"peers": True, "address": "127.0.0.1"}
    _train(root, machines[1], 2, **options)
    _train(root, machines[0], KILLED, **options)
    memory_servers.kill(machines[0])
    begin, digest, _ = _train(root, machines[1], **options)
    assert (begin, digest) == (KILLED, whole)
    assert list_committed(root)[0].step < STEPS
    assert _train(root, machines[0], **options)[:2] == (STEPS, whole)


def test_without_memory_the_root_decides(tmp_path: Path, machines: list[Path], whole: str) -> None:
    """The memory server was killed: the training continues from the root, with a warning, and ends equal."""
    root = tmp_path / "root"
    _train(root, machines[0], KILLED)
    saved = list_committed(root)[0].step
    memory_servers.kill(machines[0])
    begin, digest, warned = _train(root, machines[0])
    assert (begin, digest) == (saved, whole)
    assert "is skipped: " in warned


RANK = """
import hashlib, json, os, socket, struct, sys, time
import numpy as np
from mizzen.checkpoint import Checkpointer, CheckpointSettings, Tiers
root, rank, attempt, killed, line = sys.argv[1], *map(int, sys.argv[2:])
line = socket.socket(fileno=line)
def agree(number):
    line.sendall(struct.pack("!q", number))
    return max(number, *struct.unpack("!q", line.recv(8, socket.MSG_WAITALL)))
state, dice = {"w": np.zeros(50_000)}, np.random.default_rng(rank)
checkpointer = Checkpointer(root, attempt=attempt, interval_s=0, settings=CheckpointSettings(
    rank=rank, world_size=2, sharded=True, agree=agree, tiers=Tiers(peers=True, address="127.0.0.1")))
checkpointer.track(own=["state", "dice"], state=state, dice=dice)
begin = checkpointer.restore()
for step in range(begin + 1, 13):
    state["w"] += dice.standard_normal(50_000)
    checkpointer.step(step)
    if step == killed:
        agree(0)
        os.kill(os.getpid(), 9)
print(begin, hashlib.sha256(state["w"].tobytes() + str(dice.bit_generator.state).encode()).hexdigest())
line.close()
"""


def _train_gang(root: Path, places: list[Path], attempt: int, killed: int = 0) -> list[tuple[str, str]]:
    """Trains with two ranks, each on its machine; returns what each printed, and its warnings."""
    ends = socket.socketpair()
    ranks = []
    for rank, (machine, end) in enumerate(zip(places, ends, strict=True)):
        environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SDK), "MIZZEN_MEMORY_DIR": str(machine)}
        command = [sys.executable, "-W", "always", "-c", RANK, str(root)]
        ranks.append(subprocess.Popen(
            [*command, *map(str, (rank, attempt, killed, end.fileno()))], pass_fds=[end.fileno()],
            env=environ | {"MIZZEN_PLATFORM": "sigterm"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ))  # fmt: skip
    for end in ends:
        end.close()
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [-signal.SIGKILL if killed else 0] * 2, said
    return [(out.strip(), warned) for out, warned in said]


def test_a_sharded_gang_continues_from_the_memory_of_its_machines(tmp_path: Path, machines: list[Path]) -> None:
    """Each rank saves to its machine and a peer. One machine is lost with its memory; all ranks load the same step."""
    first, second, third = machines
    expected = [out.split()[1] for out, _ in _train_gang(tmp_path / "whole", [first, second], 1)]
    root = tmp_path / "root"
    holder = _hold(root, second, "127.0.0.1")  # So that both machines are there when the first rank saves.
    warned = _train_gang(root, [first, second], 1, KILLED)
    assert list_committed(root)[0].step < KILLED
    memory_servers.kill(first)
    said = _train_gang(root, [third, second], 2)
    holder.kill()
    holder.communicate()
    assert [out.split() for out, _ in said] == [[str(KILLED), digest] for digest in expected], (said, warned)


@pytest.mark.rotating
def test_a_gang_whose_memory_is_lost_loads_the_root(tmp_path: Path, machines: list[Path]) -> None:
    """If the memory of one rank is lost and no server has a copy, no rank loads the newer step of the other rank."""
    first, second, third = machines
    root = tmp_path / "root"
    _train_gang(root, [first, second], 1, KILLED)
    saved = list_committed(root)[0].step
    memory_servers.kill(first)
    server = connection.remote_server(*_addresses(root)[0], token_of(FileStore(root)))
    server.delete([key for key in server.ask("list", prefix="parts/")["found"] if ".r0000." in key])
    said = _train_gang(root, [third, second], 2)
    assert [out.split()[0] for out, _ in said] == [str(saved)] * 2


def _addresses(root: Path) -> list[tuple[str, int]]:
    """Returns the addresses of the memory servers that answer."""
    found = []
    for path in (root / "memory" / "servers").iterdir():
        told = json.loads(path.read_text())
        with suppress(OSError), socket.create_connection((told["host"], told["port"]), 5):
            found.append((str(told["host"]), int(told["port"])))
    return found


@pytest.mark.rotating
def test_a_silent_server_is_no_failure(tmp_path: Path, machines: list[Path], whole: str) -> None:
    """The server is frozen before the start: the root's checkpoint is loaded, and the training ends equal."""
    root = tmp_path / "root"
    _train(root, machines[0], KILLED)
    saved = list_committed(root)[0].step
    memory_servers.kill(machines[0], signal.SIGSTOP)
    begin, digest, warned = _train(root, machines[0])
    assert (begin, digest) == (saved, whole)
    assert "timed out" in warned


def test_memory_that_is_older_than_the_root_is_not_loaded(tmp_path: Path, machines: list[Path]) -> None:
    """A training without the memory tier has saved newer steps to the root."""
    root = tmp_path / "root"
    _train(root, machines[0], KILLED)
    with Checkpointer(root, attempt=9) as other:
        other.load_latest()
        other.save(KILLED + 1, {"state": {"w": np.ones(50_000)}, "dice": 1})
    found = _open(root, machines[0]).load_latest()
    assert found is not None and found.step == KILLED + 1


def test_a_removed_root_has_no_memory(tmp_path: Path, machines: list[Path], whole: str) -> None:
    """A new root at the same place has another token, so the memory of the old one is not read."""
    root = tmp_path / "root"
    _train(root, machines[0], KILLED)
    root.rename(tmp_path / "gone")
    assert _train(root, machines[0])[:2] == (0, whole)


def _open(root: Path, machine: Path, **options: Any) -> Checkpointer:
    os.environ["MIZZEN_MEMORY_DIR"] = str(machine)
    options.setdefault("attempt", None)
    attempt, settings = options.pop("attempt"), options.pop("settings", {})
    return Checkpointer(root, attempt=attempt, settings=CheckpointSettings(tiers=Tiers(**options), **settings))


def _state(step: int) -> dict[str, Any]:
    return {"model": {"w": np.full(20_000, step)}}


def _try_save(checkpointer: Checkpointer, step: int) -> bool:
    checkpointer.only_due_tiers()
    return checkpointer.try_save(step, _state(step))


def test_an_older_attempt_cannot_save_to_memory(tmp_path: Path, machines: list[Path]) -> None:
    """A save that only the memory tier is due for is fenced, too."""
    old = _open(tmp_path / "root", machines[0], attempt=1)
    for step in (1, 2):
        assert _try_save(old, step)
    assert list_committed(tmp_path / "root")[0].step == 1
    new = _open(tmp_path / "root", machines[0], attempt=2)
    found = new.load_latest()
    assert found is not None and found.step == 2
    with pytest.raises(StaleAttemptError):
        _try_save(old, 3)
    assert _try_save(new, 3)


def test_a_killed_server_is_started_again(tmp_path: Path, machines: list[Path]) -> None:
    """The next save starts a new server and stores all parts there, also those that have not changed."""
    saver = _open(tmp_path / "root", machines[0])
    frozen = {"frozen": np.arange(1000.0)}
    saver.try_save(1, _state(1) | frozen)
    memory_servers.kill(machines[0])
    saver.only_due_tiers()
    assert saver.try_save(2, _state(2) | frozen)
    found = _open(tmp_path / "root", machines[0]).load_latest()
    assert found is not None and found.step == 2
    assert all(uri.startswith("memory+") for uri in found.verified)


def _held(root: Path) -> set[str]:
    """Returns the keys of the parts that two memory servers hold; none if there are no two."""
    where = [json.loads(path.read_text()) for path in root.glob("memory/servers/*")]
    token = token_of(FileStore(root))
    servers = [connection.remote_server(one["host"], one["port"], token) for one in where]
    found = [set(server.ask("list", prefix="parts/")["found"]) for server in servers]
    return set.intersection(*found) if len(found) == 2 else set()


def test_a_peer_that_comes_later_gets_earlier_parts(tmp_path: Path, machines: list[Path]) -> None:
    """Parts that have not changed since before the peer started are copied to it, so a lost machine loses nothing."""
    root, options = tmp_path / "root", {"peers": True, "address": "127.0.0.1"}
    saver, frozen = _open(root, machines[0], **options), {"frozen": np.arange(1000.0)}
    assert saver.try_save(1, _state(1) | frozen)
    holder = _hold(root, machines[1], "127.0.0.1")
    end_s, step = time.monotonic() + 60, 1
    while not any("frozen" in key for key in _held(root)):
        assert time.monotonic() < end_s
        time.sleep(0.5)
        step += 1
        saver.only_due_tiers()
        assert saver.try_save(step, _state(step) | frozen)
    memory_servers.kill(machines[0])
    found = _open(root, machines[2], **options).load_latest()
    assert found is not None and found.step == step
    assert all(uri.startswith("memory+") for uri in found.verified)
    holder.kill()
    holder.communicate()


def test_an_address_that_is_removed_or_damaged_hides_no_other(
    tmp_path: Path, machines: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the loss of a machine, when several processes look for servers, and one removes the address."""
    root, options = tmp_path / "root", {"peers": True, "address": "127.0.0.1"}
    holder = _hold(root, machines[1], "127.0.0.1")
    assert _open(root, machines[0], **options).try_save(1, _state(1))
    memory_servers.kill(machines[0])
    (root / "memory" / "servers" / "damaged.json").write_text("[]")
    listed = FileStore.list

    def with_removed(store: FileStore, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        yield from listed(store, prefix, after=after)
        if prefix == "memory/servers/":
            yield ObjectInfo("memory/servers/removed.json", 2, "")

    monkeypatch.setattr(FileStore, "list", with_removed)
    with pytest.warns(CheckpointWarning, match=r"damaged\.json: not the address of a memory server"):
        found = _open(root, machines[2], **options).load_latest()
        holder.kill()
        holder.communicate()
    assert found is not None and found.step == 1
    assert all(uri.startswith("memory+") for uri in found.verified)


def test_a_full_server_is_a_warning(tmp_path: Path, machines: list[Path]) -> None:
    """The limit holds; the root is then saved to at the interval of a lost process."""
    saver = _open(tmp_path / "root", machines[0], memory_bytes=100_000, process_mtbf_s=1, both_mtbf_s=1e9)
    with pytest.warns(CheckpointWarning, match="100,000 bytes of memory are free, not 160"):
        assert _try_save(saver, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(2, 60):
            time.sleep(0.01)
            assert _try_save(saver, step)
    assert list_committed(tmp_path / "root")[0].step > 1


def test_two_checkpoints_need_the_room_of_two(tmp_path: Path, machines: list[Path]) -> None:
    """Removed checkpoints do not use up the limit, although their memory is kept for the next ones."""
    saver = _open(tmp_path / "root", machines[0], memory_bytes=360_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(1, 8):
            assert _try_save(saver, step)
        saver.only_due_tiers()
        assert saver.try_save(8, {"model": {"w": np.full(19_000, 1)}})


def test_damaged_memory_is_not_loaded(tmp_path: Path, machines: list[Path]) -> None:
    """A flipped bit in memory: the root's checkpoint is loaded."""
    root = tmp_path / "root"
    saver = _open(root, machines[0])
    for step in (1, 2):
        _try_save(saver, step)
    server = connection.local_server(token_of(FileStore(root)))
    for key, size in server.ask("list", prefix="parts/")["found"].items():
        content = memoryview(bytearray(size))
        assert server.get(key, content, 0) == size
        content[size // 2] ^= 1
        server.put(key, [content])
    with pytest.warns(CheckpointWarning, match="does not match its checksum"):
        found = _open(root, machines[0]).load_latest()
    assert found is not None and found.step == 1


def test_only_the_run_has_access(tmp_path: Path, machines: list[Path]) -> None:
    """Without the run's token a server answers no request, and one that has another token is not believed."""
    root = tmp_path / "root"
    saver = _open(root, machines[0], peers=True, address="127.0.0.1")
    _try_save(saver, 1)
    token = token_of(FileStore(root))
    assert (root / "memory" / "token").stat().st_mode & 0o077 == 0
    told = json.loads(next((root / "memory" / "servers").iterdir()).read_text())
    connection.remote_server(told["host"], told["port"], token).ask("list", prefix="")
    with pytest.raises(OSError, match=r"closed|reset"):
        connection.remote_server(told["host"], told["port"], bytes(32)).ask("list", prefix="")
    with socket.create_connection((told["host"], told["port"]), 5) as link:
        wire.receive(link)
        wire.send(link, {"do": "list", "prefix": ""})
        with pytest.raises(wire.ProtocolError):
            wire.receive(link)


def test_another_folder_of_servers_is_refused(tmp_path: Path, machines: list[Path]) -> None:
    """A folder that others may write to could hold a server of theirs."""
    (machines[0] / "mizzen-memory").mkdir(mode=0o777)
    (machines[0] / "mizzen-memory").chmod(0o777)
    with pytest.warns(CheckpointWarning, match="mode 0700"):
        saver = _open(tmp_path / "root", machines[0])
    with pytest.warns(CheckpointWarning, match="was not saved to this root"):
        assert _try_save(saver, 1)
    assert list_committed(tmp_path / "root")[0].step == 1


def test_an_unused_server_ends(tmp_path: Path, machines: list[Path]) -> None:
    """After its idle time a server ends, and its socket is removed."""
    _try_save(_open(tmp_path / "root", machines[0], idle_s=1), 1)
    assert memory_servers.pids(machines[0])
    end_s = time.monotonic() + 60
    while list(machines[0].glob("*/*.sock")):
        assert time.monotonic() < end_s
        time.sleep(0.1)
    assert not memory_servers.pids(machines[0])


def test_the_local_folder_is_a_tier_of_its_own(tmp_path: Path, machines: list[Path]) -> None:
    """Without memory, each save goes to the local folder, and to the root at the interval of a lost machine."""
    root, local = tmp_path / "root", tmp_path / "local"
    _train(root, machines[0], KILLED, memory_bytes=0, local=str(local))
    assert list_committed(local)[0].step > list_committed(root)[0].step
    assert not (root / "memory").exists()


def test_an_address_of_another_network_is_a_warning(tmp_path: Path, machines: list[Path], whole: str) -> None:
    """As in a sandbox with a network of its own, if the task starts the server. The training continues without it."""
    _, digest, warned = _train(tmp_path / "root", machines[0], peers=True, address="203.0.113.7")
    assert digest == whole
    assert "203.0.113.7:0 cannot be bound" in warned and "use no peers" in warned


@pytest.mark.parametrize(
    ("name", "value"),
    [("memory_bytes", -1), ("idle_s", 0), ("process_mtbf_s", 0.5), ("both_mtbf_s", float("inf")),
     ("address", "host:port"), ("address", ":80")],
)  # fmt: skip
def test_settings_out_of_range(name: str, value: Any) -> None:
    """An error names the field and the value."""
    with pytest.raises(ValueError, match=f"{name}={value!r}: must be"):
        Tiers(**{name: value})


def test_lost_records_are_an_error_even_with_memory_records(tmp_path: Path, machines: list[Path]) -> None:
    """The log of the root is lost, and so is the memory: a start from nothing would remove the parts."""
    root = tmp_path / "root"
    _try_save(_open(root, machines[0]), 1)
    memory_servers.kill(machines[0])
    for path in (root / "log").iterdir():
        path.unlink()
    with pytest.raises(CheckpointError, match="repair"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _open(root, machines[0]).load_latest()


def test_open_memory_is_lazy_about_errors(tmp_path: Path, machines: list[Path]) -> None:
    """A malformed token is a warning, and then no memory is used."""
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "token").write_text("no hex")
    os.environ["MIZZEN_MEMORY_DIR"] = str(machines[0])
    with pytest.warns(CheckpointWarning, match="the token cannot be read"):
        store = open_memory(FileStore(tmp_path), limit_bytes=None, idle_s=60, address=None)
    with pytest.raises(OSError, match="memory server of this machine"):
        store.put("parts/x", b"1")
