"""Attacks that a tenant's task runs: `attack.py TARGETS` prints a line of JSON for each, with what it got or why not.

TARGETS is a JSON object: `data_dir` of the installation, its `api` (a URL), all TCP `ports` on which it listens, and
`victim`, the pid of another tenant's
task, with the folder `victim_folder` and the checkpoint `victim_checkpoint`.
"""

import asyncio
import ctypes
import json
import os
import signal
import socket
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

Targets = dict[str, Any]
_ANSWERS_S = 3.0
_PTRACE_ATTACH = 16


class Blocked(Exception):
    """The attack did not succeed."""


def temporal_by_port(targets: Targets) -> str:
    """Connects to each TCP port of the installation as a client of Temporal, without credentials."""
    from temporalio.client import Client

    async def answering() -> list[int]:
        found = []
        for port in targets["ports"]:
            try:
                async with asyncio.timeout(_ANSWERS_S):
                    await Client.connect(f"127.0.0.1:{port}")
                found.append(port)
            except (RuntimeError, TimeoutError):
                continue
        return found

    return _some(asyncio.run(answering()), f"none of {len(targets['ports'])} ports answers")


def temporal_by_socket(targets: Targets) -> str:
    """Connects to the Unix sockets of Temporal, of its UI and of Postgres."""
    names = ("run/temporal.sock", "run/temporal-ui.sock", "postgres/data/.s.PGSQL.5432")
    found, errors = [], []
    for name in names:
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(str(Path(targets["data_dir"]) / name))
                found.append(name)
            except OSError as error:
                errors.append(f"{name}: {error.strerror}")
    return _some(found, "; ".join(errors))


def any_socket(targets: Targets) -> str:
    """Connects to the Unix sockets of mizzen and of Postgres whose paths the kernel lists."""
    paths = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()[1:] if len(line.split()) > 7}
    found = []
    for path in paths:
        if targets["data_dir"] in path or "PGSQL" in path or "mizzen" in path:
            with socket.socket(socket.AF_UNIX) as client:
                try:
                    client.connect("\0" + path[1:] if path.startswith("@") else path)
                    found.append(path)
                except OSError:
                    continue
    return _some(found, f"{len(paths)} sockets")


def postgres_by_port(targets: Targets) -> str:
    """Asks each TCP port of the installation for an encrypted connection of Postgres's protocol."""
    found = []
    for port in targets["ports"]:
        try:
            with socket.create_connection(("127.0.0.1", port), _ANSWERS_S) as client:
                client.settimeout(_ANSWERS_S)
                client.sendall(bytes.fromhex("0000000804d2162f"))
                if client.recv(1) in (b"S", b"N"):
                    found.append(port)
        except OSError:
            continue
    return _some(found, "no port answers")


def keys_and_settings(targets: Targets) -> str:
    """Reads the keys of the operator and of all machines, the master key and the settings."""
    names = ("operator.key", "master.key", "run/machine-keys.json", "run/settings.yaml", "run/agents.yaml")
    return _readable([Path(targets["data_dir"]) / name for name in (*names, "postgres/password", "temporal.db")])


def listing_of_the_data_folder(targets: Targets) -> str:
    """Lists the data folder, in which a task sees at most the folders on the way to its own, and the stack's folder."""
    found = []
    for folder in (targets["data_dir"], f"{targets['data_dir']}/run"):
        try:
            found += [one.name for one in Path(folder).iterdir() if one.name not in ("machines", "buckets")]
        except OSError:
            continue
    return _some(found, "nothing else can be listed")


def api_without_a_key(targets: Targets) -> str:
    """Calls the API and Temporal's UI without a key."""
    found = []
    for path in ("/v1/workloads", "/v1/secrets", "/temporal/", "/temporal/api/v1/namespaces", "/metrics"):
        try:
            with urllib.request.urlopen(targets["api"] + path, timeout=_ANSWERS_S) as answer:
                found.append(f"{path}: {answer.status}")
        except OSError:
            continue
    return _some([one for one in found if not one.startswith("/metrics")], "no path answers")


def environment_of_a_process(targets: Targets) -> str:
    """Reads the environment and the memory of another tenant's task, which contain its secrets."""
    return _readable([Path(f"/proc/{targets['victim']}/{name}") for name in ("environ", "mem", "maps", "cwd/.")])


def signals(targets: Targets) -> str:
    """Stops and kills another tenant's task."""
    try:
        os.kill(targets["victim"], signal.SIGCONT)
    except OSError as error:
        raise Blocked(str(error)) from None
    return "the signal was sent"


def ptrace(targets: Targets) -> str:
    """Attaches to another tenant's task as a debugger."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(_PTRACE_ATTACH, targets["victim"], None, None) != 0:
        raise Blocked(os.strerror(ctypes.get_errno()))
    return "attached"


def folder_of_another_tenant(targets: Targets) -> str:
    """Reads the working folder of another tenant's task."""
    return _readable([Path(targets["victim_folder"]), Path(targets["victim_folder"]) / "work" / "private.txt"])


def checkpoints_of_another_tenant(targets: Targets) -> str:
    """Lists and changes the checkpoints of another tenant in a bucket that is a local folder."""
    folder = Path(targets["victim_checkpoint"])
    try:
        found = [str(path) for path in folder.rglob("*")]
        (folder / "intruder").write_text("x")
    except OSError as error:
        raise Blocked(str(error)) from None
    return f"{found}, and a file was written"


def _readable(paths: list[Path]) -> str:
    found, errors = [], []
    for path in paths:
        try:
            if path.is_dir():
                found.append(f"{path}: {[one.name for one in path.iterdir()]}")
            else:
                with path.open("rb") as file:
                    found.append(f"{path}: {len(file.read(100))} bytes")
        except OSError as error:
            errors.append(f"{path.name}: {error.strerror}")
    return _some(found, "; ".join(errors))


def _some(found: list[Any], otherwise: str) -> str:
    if not found:
        raise Blocked(otherwise)
    return str(found)


ATTACKS: tuple[Callable[[Targets], str], ...] = (
    temporal_by_port, temporal_by_socket, any_socket, postgres_by_port, keys_and_settings, listing_of_the_data_folder,
    api_without_a_key, environment_of_a_process, signals, ptrace, folder_of_another_tenant,
    checkpoints_of_another_tenant,
)  # fmt: skip


def main() -> None:
    """Runs all attacks."""
    targets = json.loads(Path(sys.argv[1]).read_text())
    for attack in ATTACKS:
        try:
            line = {"attack": attack.__name__, "got": attack(targets)}
        except Blocked as error:
            line = {"attack": attack.__name__, "blocked": str(error)}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
