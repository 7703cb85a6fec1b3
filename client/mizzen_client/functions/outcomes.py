"""Reads the outcome of a call: the pickle of its result or of its exception.

The task prints it: every task can write its log, and the API can read it, whatever the isolation, the store of the
checkpoints and the credentials of the task are.
"""

import base64
import hmac
import pickle
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from mizzen_client.functions import runner
from mizzen_client.functions.errors import CallFailed, RemoteError, RemoteTraceback
from mizzen_client.functions.future import CallFuture
from mizzen_client.views import Workload

if TYPE_CHECKING:
    from mizzen_client import Client

LABEL = "mizzen-executor"
"""The label of all workloads of an executor. Its value is a random text, with which tasks sign their outcomes."""
_LINE = re.compile(rb"%s ([0-9]+)/([0-9]+) ([0-9a-f]{64}) (\S+)" % runner.MARK.encode())


def fetch(client: "Client", ended: Workload) -> bytes | None:
    """Return the outcome that a task of a workload has printed in its last attempt; None: there is none.

    Raises:
        ClientError: the API cannot be reached, or refuses.
    """
    key = ended["labels"].get(LABEL, "")
    found: dict[tuple[int, str], dict[int, bytes]] = defaultdict(dict)
    body = None
    # Following ends when the log is complete, which can be later than the end of the workload.
    for line in client.logs(ended["id"], attempt=ended["attempt"], follow=True):
        if (match := _LINE.search(line)) is None:
            continue
        number, total, signature = int(match[1]), int(match[2]), match[3].decode()
        parts = found[total, signature]
        parts[number] = match[4]
        if len(parts) == total:
            text = b"".join(parts[part] for part in sorted(parts)).decode()
            if hmac.compare_digest(signature, runner.sign(text, key)):
                body = zlib.decompress(base64.b85decode(text))
    return body


def without_outcome(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a log without the lines that the runner prints for the outcome."""
    for line in lines:
        own = _LINE.sub(b"", line)
        if own == line or own:
            yield own


def resolve(future: CallFuture[Any], ended: Workload, body: bytes | None) -> None:
    """Give a future the outcome of its workload, which has ended. This loads a pickle that a task wrote."""
    if ended["phase"] == "cancelled":
        future.end_cancelled()
    elif body is None:
        reason = ended["reason"]
        said = (
            reason["sentence"]
            if reason
            else "its outcome is missing: the function exited its process, or the log was lost"
        )
        message = f"{ended['id']} has {ended['phase']}: {said}; `mizzen logs {ended['id']}` has its output"
        future.set_exception(CallFailed(message, ended["id"]))
    elif body[:1] == b"+":
        future.set_result(pickle.loads(body[1:]))
    else:
        pickled, text = pickle.loads(body[1:])
        error = RemoteError(text) if pickled is None else pickle.loads(pickled)
        error.__cause__ = RemoteTraceback(text)
        future.set_exception(error)
