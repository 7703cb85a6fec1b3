"""The client of the REST API, with one method per operation."""

import re
import ssl
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from mizzen_client import followers, views
from mizzen_client.calls import path_of
from mizzen_client.contexts import active_context
from mizzen_client.data import Data
from mizzen_client.fleet import FleetMethods
from mizzen_client.log_lines import FollowedTo, Labels, Logs, labels_of, next_attempt
from mizzen_client.output_calls import OutputCalls
from mizzen_client.services import Services
from mizzen_client.transport import Backoff, Transport

if TYPE_CHECKING:
    from mizzen_client.archives import PackedFolder

_POLL_FIRST_S = 0.25
_POLL_LONGEST_S = 3.0
_POLLS_PER_S = 20.0


ROOM_PATIENCE_S = 86400.0
"""The default time for which a submission is retried while its tenant's queue is full: one day."""


class Client(Data, FleetMethods, OutputCalls, Services):
    """A client of one API. Methods return the API's JSON (see `views`) and raise `mizzen_client.errors.ClientError`.

    Use it as a context manager, or call `close`.

    Args:
        url: URL of the API.
        api_key: the API key, or a function that returns a token for each request; None: no key is sent.
        ca: PEM file with authorities to trust in addition to the system's.
        patience_s: the time for which a request is retried while the API is unreachable or busy.
        room_patience_s: the time for which a submission is retried while its tenant's queue is full; 0: it fails at
            once.
        follow_patience_s: the time for which waiting and following, which may last for days, retry after the last
            response.
        answer_s: a connection that receives nothing for this time counts as lost.
        on_retry: called before each retry with the error and the seconds that are left.
        on_expiry: called at most once, with the time at which the API key expires, if that is soon.
    """

    def __init__(
        self,
        url: str,
        api_key: str | Callable[[], str] | None = None,
        *,
        ca: str | None = None,
        patience_s: float = 30.0,
        room_patience_s: float = ROOM_PATIENCE_S,
        follow_patience_s: float = 600.0,
        answer_s: float = 60.0,
        on_retry: Callable[[str, float], None] | None = None,
        on_expiry: Callable[[str], None] | None = None,
    ) -> None:
        self._transport = Transport(url, api_key, patience_s, answer_s, on_retry, on_expiry, ca)
        self._room_patience_s = room_patience_s
        self._follow_patience_s = follow_patience_s

    @classmethod
    def from_environment(cls, context: str | None = None, **options: Any) -> Self:
        """Create a client for `context`, or for the context that `contexts.active_context` selects."""
        chosen = active_context(context)
        return cls(chosen.api, chosen.credential, ca=chosen.ca, **options)

    @property
    def url(self) -> str:
        """The URL of the API."""
        return self._transport.url

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --------------------------------------------------------------------------------------------------- workloads

    def submit(
        self,
        document: Mapping[str, Any],
        workdir: "Path | str | PackedFolder | None" = None,
        *,
        idempotency_key: str | None = None,
    ) -> views.Submitted:
        """Submit a workload document, with the files of the folder `workdir` if given, which may be packed already.

        A call creates at most one workload, even if its request is retried: an Idempotency-Key is always sent. By
        default it is a new key.
        """
        headers = {"idempotency-key": idempotency_key or uuid.uuid4().hex}
        answer = self._send_workload(document, workdir, headers=headers, room_patience_s=self._room_patience_s)
        return cast(views.Submitted, answer)

    def dry_run(
        self, document: Mapping[str, Any], workdir: Path | str | None = None, *, patience_s: float | None = None
    ) -> views.DryRun:
        """Return what a submission of the document would do now. It creates no workload, but uploads a `workdir`."""
        answer = self._send_workload(document, workdir, params={"dry_run": "true"}, patience_s=patience_s)
        return cast(views.DryRun, answer)

    def _send_workload(
        self, document: Mapping[str, Any], workdir: "Path | str | PackedFolder | None", **options: Any
    ) -> Any:
        return self._send("POST", ("workloads",), document, workdir, idempotent=True, **options)

    def workloads(
        self,
        *,
        tenant: str | None = None,
        phases: Iterable[str] = (),
        labels: Mapping[str, str] | None = None,
        name: str | None = None,
        array: str | None = None,
        limit: int | None = None,
    ) -> Iterator[views.Workload]:
        """Return the workloads that match all filters, at most `limit`. Pages are fetched as they are needed.

        An array is one workload. Its elements that have been placed are returned if `array` is its id.
        """
        params = {
            "tenant": tenant,
            "phase": list(phases),
            "label": [f"{key}={value}" for key, value in (labels or {}).items()],
            "name": name,
            "array": array,
        }
        return self._pages("workloads", params, limit)

    def workload(self, workload_id: str) -> views.WorkloadDetail:
        """Return a workload with its specification and placement."""
        return cast(views.WorkloadDetail, self._call("GET", "workloads", workload_id))

    def why(self, workload_id: str) -> views.Why:
        """Return why a workload is in its current phase or still waits."""
        return cast(views.Why, self._call("GET", "workloads", workload_id, "why"))

    def attempts(self, workload_id: str) -> list[views.Attempt]:
        """Return the attempts of a workload, oldest first."""
        return list(self._pages(("workloads", workload_id, "attempts"), {}, None))

    def progress(self, workload_id: str) -> views.Curve:
        """Return the steps and metrics of a workload's attempts over time."""
        return cast(views.Curve, self._call("GET", "workloads", workload_id, "progress"))

    def allocations(self, workload_id: str) -> list[views.Allocation]:
        """Return the current and past allocations of a workload, oldest first."""
        return list(self._pages(("workloads", workload_id, "allocations"), {}, None))

    def request_session(
        self, workload_id: str, kind: str = "exec", *, job: str | None = None, task: int = 0
    ) -> views.Session:
        """Request a session in a running task; `mizzen_client.remote_command` connects to it.

        `kind` is `exec` for a command, or `forward` for connections to ports. `job` None: the first one.
        """
        body = {"kind": kind, "job": job, "task": task}
        # Not needed again: a session whose response was lost ends after some seconds.
        answer = self._call("POST", "workloads", workload_id, "sessions", body=body, idempotent=True)
        return cast(views.Session, answer)

    @property
    def tls(self) -> ssl.SSLContext:
        """The TLS context of connections to the API."""
        return self._transport.tls

    def cancel(self, workload_id: str, only: str | None = None) -> views.Workload:
        """Cancel a workload in any phase. If it has already succeeded or failed, raise `Conflict`.

        `only`, for arrays: `waiting`, the elements that were never placed, or `failed`, those with another attempt.
        """
        params = {"only": only} if only else {}
        answer = self._call("POST", "workloads", workload_id, "cancel", params=params, idempotent=True)
        return cast(views.Workload, answer)

    def cancel_labelled(self, labels: Mapping[str, str], tenant: str | None = None) -> list[str]:
        """Cancel all live workloads with these labels. Return their ids."""
        body = {"labels": dict(labels)} | ({"tenant": tenant} if tenant else {})
        answer = self._call("POST", "workloads", "cancel", body=body, idempotent=True)
        return cast(list[str], answer["cancelled"])

    def hold(self, workload_id: str) -> views.Workload:
        """Keep a workload in the queue until it is released."""
        return self._act(workload_id, "hold")

    def release(self, workload_id: str) -> views.Workload:
        """Release a held workload, so that it can be placed again."""
        return self._act(workload_id, "release")

    def preempt(self, workload_id: str) -> views.Workload:
        """Return a workload to the queue after it has saved a checkpoint (operators)."""
        # Not retried: a second request could also preempt the next attempt.
        return self._act(workload_id, "preempt", idempotent=False)

    def lower(self, workload_id: str, level: int) -> views.Workload:
        """Lower the priority of a workload to `level` (7 is the lowest)."""
        answer = self._call("PATCH", "workloads", workload_id, body={"level": level}, idempotent=True)
        return cast(views.Workload, answer)

    def throttle(self, array_id: str, throttle: int) -> views.Workload:
        """Set how many elements of an array run at a time; 0: no limit."""
        answer = self._call("PATCH", "workloads", array_id, body={"throttle": throttle}, idempotent=True)
        return cast(views.Workload, answer)

    def wait(
        self,
        workload_ids: Sequence[str],
        on_change: Callable[[views.Workload], None] | None = None,
    ) -> list[views.WorkloadDetail]:
        """Wait until all workloads have ended. Return them in the given order. Call `on_change` for each new phase."""
        seen: dict[str, views.WorkloadDetail] = {}
        began_s = time.monotonic()
        while True:
            live = [id_ for id_ in workload_ids if id_ not in seen or seen[id_]["phase"] not in views.TERMINAL_PHASES]
            if not live:
                return [seen[id_] for id_ in workload_ids]
            for id_ in dict.fromkeys(live):
                now = self._patiently(id_)
                changed = id_ not in seen or seen[id_]["phase"] != now["phase"]
                seen[id_] = now
                if changed and on_change is not None:
                    on_change(now)
            if any(seen[id_]["phase"] not in views.TERMINAL_PHASES for id_ in live):
                # The interval grows with the waiting time and the number of workloads, to limit the load on the API.
                by_age_s = min(_POLL_LONGEST_S, max(_POLL_FIRST_S, (time.monotonic() - began_s) / 10))
                time.sleep(max(by_age_s, len(live) / _POLLS_PER_S))

    def events(
        self, workload_id: str | None = None, *, follow: bool = False, after: str | None = None
    ) -> Iterator[views.Event]:
        """Yield the events of one workload, or all events that the API key may see.

        With `follow`, new events are yielded as they occur, also after a lost connection. The iteration ends after the
        workload's last event.

        Args:
            workload_id: the workload; None: all events.
            follow: continue with new events.
            after: yield only events after the one with this id; `now`: only future events; None: all events.
        """
        path = path_of("workloads", workload_id, "events") if workload_id else path_of("events")
        ended = None if workload_id is None else lambda: self._patiently(workload_id)["phase"] in views.TERMINAL_PHASES
        return followers.events(self._transport, path, self._pauses(follow), after, follow, ended)

    def logs(
        self,
        workload_id: str,
        *,
        job: str | None = None,
        task: int | None = None,
        attempt: int | None = None,
        since: datetime | None = None,
        output: str | None = None,
        grep: str | None = None,
        tail: int | None = None,
        follow: bool = False,
        on_attempt: Callable[[int], None] | None = None,
        position: FollowedTo | None = None,
    ) -> Iterator[bytes]:
        """Yield the lines of the tasks' output, without line ends. With several tasks, each starts with `job/task| `.

        Those of an array start with `name/index: `. With `follow`, new lines are yielded until the workload (or the
        given attempt) has ended, also after a lost connection and from later attempts. No line is yielded twice.

        Args:
            workload_id: the workload or the array.
            job: only the tasks of this job.
            task: only the task with this index.
            attempt: the attempt; None: the newest. Not for an array.
            since: only lines that were uploaded after this time.
            output: `stdout` or `stderr`, of jobs with `output: separate`; None: both.
            grep: only lines that match this regular expression, in Python's syntax.
            tail: only this number of last lines of each task; with `grep`, of its lines that match.
            follow: continue with new lines.
            on_attempt: called with the number of each later attempt.
            position: with `follow` and without `tail`: updated with each line. A call with the position of an earlier
                one that was interrupted continues where that ended.

        Raises:
            re.error: `grep` is not a regular expression.
        """
        pattern = None if grep is None else re.compile(grep)
        after = None if since is None else since.astimezone(UTC).isoformat()
        params = {"job": job, "task": task, "since": after, "output": output}
        read = partial(self._patiently, workload_id)
        labels = labels_of(read(), job, task) if follow or pattern is not None else Labels(b"| ")
        path = path_of("workloads", workload_id, "logs")
        logs = Logs(self._transport, path, params, self._pauses(follow), labels, pattern)
        if not follow:
            yield from logs.now(attempt, tail)
            return
        position = position or FollowedTo()
        if labels.is_by_element:
            yield from logs.follow(None, tail, lambda: read()["phase"] in views.TERMINAL_PHASES, position.seen)
            return
        number = position.attempt or attempt or next_attempt(read, 0)
        while number is not None:
            position.attempt = number
            yield from logs.follow(number, tail, partial(self._is_released, workload_id, number), position.seen)
            number = None if attempt is not None else next_attempt(read, number)
            tail = None
            position.seen.clear()
            if number is not None and on_attempt is not None:
                on_attempt(number)

    def _is_released(self, workload_id: str, attempt: int) -> bool:
        answer = self._transport.request(
            "GET", path_of("workloads", workload_id, "attempts"), patience_s=self._follow_patience_s
        )
        return all(a["released_at"] is not None for a in answer["items"] if a["attempt"] == attempt)

    def _patiently(self, workload_id: str) -> views.WorkloadDetail:
        answer = self._transport.request("GET", path_of("workloads", workload_id), patience_s=self._follow_patience_s)
        return cast(views.WorkloadDetail, answer)

    def _pauses(self, follow: bool) -> Backoff:
        return self._transport.pauses(self._follow_patience_s if follow else None)

    # --------------------------------------------------------------------------------------- queue, tenants and keys

    def queue(self, limit: int = 1000) -> views.Queue:
        """Return the queue as of the last scan, at most `limit` entries (at most 10000)."""
        return cast(views.Queue, self._call("GET", "queue", params={"limit": limit}))

    def whoami(self) -> views.Identity:
        """Return the identity of the API key: its role, tenant and label."""
        return cast(views.Identity, self._call("GET", "whoami"))

    def console_link(self) -> str:
        """Return a link that logs one browser in at the console with the API key, once, within five minutes."""
        return f"{self.url}{self._call('POST', 'console-links')['path']}"

    def tenants(self) -> list[views.Tenant]:
        """Return all tenants, or only the tenant of the API key if it has one."""
        return list(self._pages("tenants", {}, None))

    def tenant(self, name: str) -> views.Tenant:
        """Return a tenant."""
        return cast(views.Tenant, self._call("GET", "tenants", name))

    def set_tenant(
        self, name: str, level: int, gpus: Mapping[str, int], cpus: float | None, isolation: str | None = None
    ) -> views.Tenant:
        """Create or replace a tenant: level 1..7, GPU slots by type, CPUs in cores (None: no limit).

        `isolation` is the weakest isolation of tasks on machines that run its workloads; None: any.
        """
        body = {"level": level, "quota": {"gpus": dict(gpus), "cpus": cpus}, "isolation": isolation}
        return cast(views.Tenant, self._call("PUT", "tenants", name, body=body))

    def remove_tenant(self, name: str) -> None:
        """Remove a tenant."""
        self._call("DELETE", "tenants", name)

    def secrets(self, tenant: str) -> list[str]:
        """Return the names of the tenant's secrets. The API never returns their values."""
        return [item["name"] for item in self._pages(("tenants", tenant, "secrets"), {}, None)]

    def set_secret(self, tenant: str, name: str, value: str) -> None:
        """Create or replace a secret."""
        self._call("PUT", "tenants", tenant, "secrets", name, body={"value": value})

    def remove_secret(self, tenant: str, name: str) -> None:
        """Remove a secret."""
        self._call("DELETE", "tenants", tenant, "secrets", name)

    def keys(self) -> list[views.Key]:
        """Return the API keys, oldest first, without their secret values."""
        return sorted(self._pages("keys", {}, None), key=lambda key: (key["created_at"], key["id"]))

    def create_key(
        self,
        role: str,
        tenant: str | None = None,
        label: str = "",
        expires_in_s: int | None = None,
        machine: str | None = None,
        person: str | None = None,
    ) -> views.NewKey:
        """Create an API key. Only this response contains the secret value, as `key`. `expires_in_s` None: no expiry.

        `machine` is the id of the machine, for a key of the role `machine`. Keys with the same `person` count as one
        person of a tenant.
        """
        body: dict[str, Any] = {"role": role, "tenant": tenant, "label": label, "expires_in_s": expires_in_s}
        body |= {} if machine is None else {"machine": machine}
        body |= {} if person is None else {"person": person}
        return cast(views.NewKey, self._call("POST", "keys", body=body))

    def revoke_key(self, key_id: str) -> None:
        """Revoke an API key. It takes effect immediately."""
        self._call("DELETE", "keys", key_id)

    def audit(self, limit: int | None = None) -> Iterator[views.AuditEntry]:
        """Return the entries of the audit log, at most `limit`."""
        return self._pages("audit", {}, limit)

    # ------------------------------------------------------------------------------------------------------- helpers

    def _act(self, workload_id: str, action: str, idempotent: bool = True) -> views.Workload:
        return cast(views.Workload, self._call("POST", "workloads", workload_id, action, idempotent=idempotent))
