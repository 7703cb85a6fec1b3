"""Checks, before tasks start, that the bucket of a cluster's store is the one with the workload's checkpoints.

A task's own variables, secrets and working directory determine which endpoint and account it uses for a bucket, and
these may differ from the scheduler's. An empty bucket there is no error for the task: it would start from the
beginning. So a process with the task's environment, user and working directory looks for the marker that the scheduler
wrote beside the checkpoints (`agent.isolation` does the same for folders).
"""

import contextlib
import json
import math
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import mizzen
from agent.cgroups import remove_cgroup
from agent.launch import TaskLaunch
from domain.ids import checkpoint_marker_key, checkpoint_prefix
from domain.launch import LaunchDescription

TIMEOUT_S = 60.0
"""How long the store may take to answer, with the retries of its client library."""
_MESSAGE_CHARACTERS = 500
_KEPT_BYTES = 1 << 16
# The first process prepares a second one as the shim does: its variables can name programs, such as those of AWS that
# give credentials, so it is isolated like the task.
_ENTER = """
import json, os, signal, sys
told = json.load(sys.stdin)
sys.path.insert(0, told["agent"])
from agent.cgroups import join
from agent.sandbox import hold
from agent.shim import isolate
held = None if told["sandbox"] is None else hold(**told["sandbox"])
if held is not None:
    held.fork_inside()
signal.alarm(told["timeout_s"])
shim, pid = os.getpid(), os.fork()
if pid == 0:
    join(told["cgroups"])
    isolate(told, shim, held)
    os.chdir(told["cwd"])
    os.execve(sys.executable, [sys.executable, "-I", "-c", *told["then"]], told["env"])
status = os.waitpid(pid, 0)[1]
if held is not None:
    held.release()
sys.exit(os.waitstatus_to_exitcode(status))
"""
_LOOK = """
import json, sys
sys.path.insert(0, sys.argv[1])
from mizzen.objects.urls import open_store
try:
    said = {"found": open_store(sys.argv[2]).size(sys.argv[3]) is not None}
except Exception as error:
    said = {"kinds": [kind.__name__ for kind in type(error).__mro__]}
    said["error"] = f"{type(error).__name__}: {error}"[:1000]
print("\\n" + json.dumps(said))
"""
_NO_CREDENTIALS = {"NoCredentialsError", "DefaultCredentialsError"}


class WrongStore(Exception):
    """The store does not answer, or lacks the marker. The message names the store and what to do."""


def remote_store(bucket_url: str, launch: LaunchDescription) -> str | None:
    """Returns the URL of the cluster's store with the checkpoints; None: the store is a folder, or the region's bucket.

    `bucket_url` is the region's bucket.
    """
    uri, suffix = launch.checkpoint.uri, f"/{checkpoint_prefix(launch.workload_id)}"
    if urlsplit(uri).scheme not in ("s3", "gs") or not uri.endswith(suffix):
        return None
    url = uri.removesuffix(suffix)
    return None if _place(url) == _place(bucket_url) else url


def check_remote(url: str, workload_id: str, task: TaskLaunch, cgroups: Sequence[str]) -> None:
    """Checks that a task finds the marker of its workload in a store. Takes a second, and at most `TIMEOUT_S`.

    A task without credentials is not checked, because it must obtain them itself before it can read the store.

    Args:
        url: the store.
        workload_id: the workload whose checkpoints are there.
        task: its environment, user and working directory are used to read the store.
        cgroups: cgroups with the task's limits and rules. They are removed with all processes in them.

    Raises:
        WrongStore: the store does not answer, or lacks the marker.
    """
    key = checkpoint_marker_key(workload_id)
    told = {
        "agent": str(Path(__file__).parents[1]),
        "timeout_s": math.ceil(TIMEOUT_S),
        "cgroups": list(cgroups),
        "sandbox": task.sandbox,
        "uid": task.uid,
        "gid": task.gid,
        "groups": list(task.groups),
        "cwd": task.cwd,
        "env": task.env,
        "then": [_LOOK, str(Path(mizzen.__file__).parents[1]), url, key],
    }
    try:
        status, output, errors = _run([sys.executable, "-I", "-c", _ENTER], json.dumps(told).encode())
    except TimeoutError:
        raise WrongStore(f"the store {url}: no answer within {TIMEOUT_S:g} s") from None
    finally:
        for cgroup in cgroups:
            remove_cgroup(cgroup)
    said = {}
    with contextlib.suppress(ValueError, IndexError):
        said = json.loads(output.strip().splitlines()[-1])
    if not isinstance(said, dict) or not said:
        last = (errors.strip().splitlines() or [f"status {status}"])[-1]
        raise WrongStore(f"the store {url}: it could not be checked: {last[:_MESSAGE_CHARACTERS]}")
    if said.get("found") is False:
        raise WrongStore(
            f"the store {url}: the marker {key} is missing: the task's variables, credentials or region lead to another"
            " bucket than those of the region's workers"
        )
    if said.get("found") is not True and not _NO_CREDENTIALS & set(said.get("kinds", ())):
        raise WrongStore(f"the store {url}: {str(said.get('error'))[:_MESSAGE_CHARACTERS]}")


def _run(command: Sequence[str], told: bytes) -> tuple[int, str, str]:
    """Runs a command with the input `told`. Returns its status, and the last `_KEPT_BYTES` of its output and errors.

    Earlier output is discarded, because programs of the task may write without limit.

    Raises:
        TimeoutError: after `TIMEOUT_S`, it or a process that it has started still has its output open.
    """
    until_s, kept = time.monotonic() + TIMEOUT_S, [b"", b""]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe) as process,
        selectors.DefaultSelector() as reading,
    ):
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        for number, written in enumerate((process.stdout, process.stderr)):
            reading.register(written, selectors.EVENT_READ, number)
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin as asked:
                asked.write(told)
            while reading.get_map():
                if (left_s := until_s - time.monotonic()) <= 0:
                    raise TimeoutError
                for key, _ in reading.select(left_s):
                    piece = os.read(key.fd, _KEPT_BYTES)
                    kept[key.data] = (kept[key.data] + piece)[-_KEPT_BYTES:]
                    if not piece:
                        reading.unregister(key.fileobj)
            status = process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        finally:
            process.kill()
    return status, kept[0].decode(errors="replace"), kept[1].decode(errors="replace")


def _place(url: str) -> tuple[str, str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc, unquote(parts.path).strip("/")
