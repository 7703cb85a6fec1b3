"""What one key and one tenant may use of a process: requests per second, requests at the same time.

The counts are this process's. Several API processes behind one address each allow as much; what the database counts
(queued workloads, archive bytes, secrets) holds for all of them together.
"""

import time
from collections import Counter
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from api.auth import Caller, caller_of
from api.problems import Problem, over_limit
from domain.token_bucket import TokenBucket
from infra.config import LimitSettings

_ADMITTED = "mizzen.admitted"


class Admitted:
    """One request among those of its key and tenant that are being answered."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """It counts no more: it was answered, or is a stream, which has limits of its own."""
        if self._release is not None:
            self._release()
            self._release = None


def release(scope: Scope) -> None:
    """Stops counting the request of `scope` among those at the same time."""
    admitted = scope.get(_ADMITTED)
    if isinstance(admitted, Admitted):
        admitted.release()


class Admission:
    """ASGI middleware behind authentication: refuses what is over the limits of its key or tenant with 429."""

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
        except Problem as problem:
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
                    f"{self._answering[kind, name]} requests of {kind} {name} are being answered; "
                    "send the next one when one of them has its answer", 1,
                )  # fmt: skip
        now_s = self._clock()
        buckets = [self._bucket((kind, name), rate, now_s) for kind, name, rate, _ in owners]
        for bucket, (kind, name, rate, _) in zip(buckets, owners, strict=True):
            if (wait_s := bucket.wait_s(now_s)) > 0:
                raise over_limit(
                    f"requests_per_{kind}", rate,
                    f"{kind} {name} has sent more requests than are allowed; send at most {rate:g} per second", wait_s,
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
