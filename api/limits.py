"""Rate limits and concurrency limits of requests, for each key and each tenant.

The counts are per process: each of several API processes behind one address allows the full limits. Limits that are
counted in the database (queued workloads, archive bytes, secrets) apply to all processes together.
"""

import time
from collections import Counter
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from api.auth import Caller, caller_of
from api.problems import HttpProblem, over_limit
from domain.token_bucket import TokenBucket
from infra.config.services import LimitSettings

_ADMITTED = "mizzen.admitted"


class Admitted:
    """An admitted request, which counts towards the concurrent requests of its key and tenant."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Stops counting the request, because it is complete or is a stream, which has its own limits. Idempotent."""
        if self._release is not None:
            self._release()
            self._release = None


def release(scope: Scope) -> None:
    """Stops counting the request of `scope` as a concurrent request."""
    admitted = scope.get(_ADMITTED)
    if isinstance(admitted, Admitted):
        admitted.release()


class Admission:
    """ASGI middleware after authentication: responds with 429 to requests beyond the limits of their key or tenant."""

    def __init__(self, app: ASGIApp, settings: LimitSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._settings = settings
        self._clock = clock
        self._buckets: dict[tuple[str, str], TokenBucket] = {}
        self._answering: Counter[tuple[str, str]] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        caller = caller_of(scope)
        if caller is None:
            await self._app(scope, receive, send)
            return
        try:
            admitted = self._admit(caller)
        except HttpProblem as problem:
            await problem.response()(scope, receive, send)
            return
        scope[_ADMITTED] = admitted
        try:
            await self._app(scope, receive, send)
        finally:
            admitted.release()

    def _admit(self, caller: Caller) -> Admitted:
        limits = self._settings
        owners = [("key", caller.id, limits.requests_per_key, limits.concurrent_per_key)]
        if caller.tenant is not None:
            owners.append(("tenant", caller.tenant, limits.requests_per_tenant, limits.concurrent_per_tenant))
        for kind, name, _, most in owners:
            if self._answering[kind, name] >= most:
                raise over_limit(
                    f"concurrent_per_{kind}", most,
                    f"{self._answering[kind, name]} requests of {kind} {name} are in progress; "
                    "send the next one when one of them is complete", 1,
                )  # fmt: skip
        now_s = self._clock()
        buckets = [self._bucket((kind, name), rate, now_s) for kind, name, rate, _ in owners]
        for bucket, (kind, name, rate, _) in zip(buckets, owners, strict=True):
            if (wait_s := bucket.wait_s(now_s)) > 0:
                raise over_limit(
                    f"requests_per_{kind}", rate,
                    f"{kind} {name} has exceeded its request rate; send at most {rate:g} per second", wait_s,
                )  # fmt: skip
        for bucket in buckets:
            bucket.tokens -= 1
        self._answering.update((kind, name) for kind, name, _, _ in owners)
        return Admitted(lambda: self._answered([(kind, name) for kind, name, _, _ in owners]))

    def _bucket(self, owner: tuple[str, str], rate: float, now_s: float) -> TokenBucket:
        if owner not in self._buckets:
            size = max(1.0, rate * self._settings.burst_s)
            self._buckets[owner] = TokenBucket(rate, size, size, now_s)
        return self._buckets[owner]

    def _answered(self, owners: list[tuple[str, str]]) -> None:
        for owner in owners:
            self._answering[owner] -= 1
            if not self._answering[owner]:
                del self._answering[owner]
