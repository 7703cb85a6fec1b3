"""Serves the agents' calls: authentication, limits, the check of the request, and the call of Temporal.

Counts the calls for Prometheus.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from infra.payload_codec import EncryptingCodec
from proxies.gateway.connections import Connections
from proxies.gateway.keys import MachineSession, Sessions
from proxies.gateway.limits import Buckets, MachineLimits, address_of
from proxies.gateway.methods import SERVICE, Method, Scope, method_of, read
from proxies.gateway.refusals import Refused, malformed, unauthenticated
from proxies.gateway.task_tokens import TaskTokens
from proxies.gateway.values import encoded

_PREFIX = "mizzen_gateway"


class GatewayMetrics(Collector):
    """Counts of calls, which `proxies.gateway.proxy` adds, and values that are read when Prometheus asks."""

    def __init__(self, sessions: Sessions, machines: MachineLimits) -> None:
        self._sessions, self._machines = sessions, machines
        self.connections: Connections | None = None
        """Set once the gateway listens."""
        self._counted = CollectorRegistry(auto_describe=False)
        self.calls = Counter(
            f"{_PREFIX}_calls", "Calls that ended, by method and status code of gRPC", ["method", "code"],
            registry=self._counted,
        )  # fmt: skip
        """Calls of methods that agents may not call, and calls without a valid key, have the method `other`."""
        self.temporal_s = Histogram(
            f"{_PREFIX}_temporal_seconds", "Time until Temporal answered a call, except polls", ["method"],
            registry=self._counted,
        )  # fmt: skip

    def collect(self) -> Iterable[Metric]:
        """Returns the current values."""
        yield from self._counted.collect()
        calls = GaugeMetricFamily(f"{_PREFIX}_calls_in_progress", "Calls in progress", labels=["kind"])
        polls, others = self._machines.in_progress()
        calls.add_metric(["poll"], polls)
        calls.add_metric(["other"], others)
        yield calls
        yield _gauge("keys", "Valid keys that were used within the last minute", self._sessions.in_use)
        yield _gauge(
            "keys_check_age_seconds",
            "Seconds since the keys in use were read from Postgres; revocations since then have no effect yet",
            self._sessions.check_age_s,
        )
        if self.connections is not None:
            yield _gauge("connections", "Open connections of agents", self.connections.open)
            yield _gauge("addresses", "Addresses with open connections", self.connections.addresses)
            ended = "Connections that were ended because their address had too many"
            yield CounterMetricFamily(f"{_PREFIX}_connections_ended", ended, self.connections.ended)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{_PREFIX}_{name}", text, value)


_POLL_S, _CALL_S = 90.0, 30.0
"""Longest time of a forwarded call. The SDK's own limits are shorter for polls and equal for other calls."""
_BODY_S = 5.0
"""Longest time until the request of a call has arrived, after the key was checked."""
_LOGGED_PER_S, _LOGGED_BURST = 0.1, 5.0
_log = logging.getLogger(__name__)


class Gateway:
    """A generic handler of gRPC for all methods. Create it in a running event loop."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        metadata: tuple[tuple[str, str], ...],
        namespace: str,
        sessions: Sessions,
        tokens: TaskTokens,
        codec: EncryptingCodec | None,
    ) -> None:
        """`metadata` is sent to Temporal with each call; it contains the installation's credentials.

        `codec`: what encrypts payloads in Temporal. Agents get and send them in the clear, within TLS.
        """
        self._channel, self._metadata, self._namespace = channel, metadata, namespace
        self._sessions, self._tokens, self._codec = sessions, tokens, codec
        self._limits = MachineLimits()
        self.metrics = GatewayMetrics(sessions, self._limits)
        self._logged = Buckets(_LOGGED_PER_S, _LOGGED_BURST)
        self._stopping = asyncio.Event()

    def service(self, details: Any) -> grpc.RpcMethodHandler:
        """Returns the handler of a call; see `grpc.GenericRpcHandler`.

        gRPC would read the whole request before it calls the handler of a unary call. As a stream, the request is read
        only after the key was checked, so calls without a valid key neither wait nor use memory.
        """
        return grpc.stream_unary_rpc_method_handler(partial(self._serve, details.method))

    def stop(self) -> None:
        """Ends the calls in progress with UNAVAILABLE. Agents repeat them, at this gateway or another one."""
        self._stopping.set()

    async def _serve(self, path: str, _: Any, context: grpc.aio.ServicerContext) -> bytes:
        counted = _Counted()
        try:
            answer = await self._answer(path, context, counted)
            counted.code = grpc.StatusCode.OK
            return answer
        except Refused as refused:
            counted.code = refused.code
            await context.abort(refused.code, str(refused))
        except grpc.aio.AioRpcError as error:
            counted.code = error.code()
            await context.abort(error.code(), error.details() or "", _details(error))
        finally:
            self.metrics.calls.labels(counted.method, counted.code.name).inc()
        raise AssertionError("abort raises")

    async def _answer(self, path: str, context: grpc.aio.ServicerContext, counted: "_Counted") -> bytes:
        metadata = dict(context.invocation_metadata() or ())
        address = address_of(context.peer())
        session = await self._sessions.of_call(metadata.get("authorization"), address)
        try:
            name, method = method_of(path)
            counted.method = name
            with self._limits.admitted(session.machine, method):
                return await self._until(session, self._call(session, name, method, context))
        except Refused as refused:
            if self._logged.take(session.machine):
                _log.warning("machine %s, key %s, %s: %s", session.machine, session.key_id, address, refused)
            raise

    async def _call(
        self, session: MachineSession, name: str, method: Method, context: grpc.aio.ServicerContext
    ) -> bytes:
        body = await _body(context)
        self._limits.check_size(session.machine, method, len(body))
        scope = Scope(session.machine, session.key_id, self._namespace, self._tokens)
        request = method.check(scope, read(method, body))
        if method.is_local:
            return request.SerializeToString()
        codec = None if self._codec is None else self._codec.of_machine(session.machine)
        if codec is not None:
            codec.encrypt_in(request, lambda given: encoded(given).payloads[0])
        response = await self._forward(name, method, request.SerializeToString(), context)
        if method.answer is None:
            return response
        answer = method.answer(scope, method.response.FromString(response))
        if codec is not None:
            codec.decrypt_in(answer)
        return answer.SerializeToString()

    async def _forward(self, name: str, method: Method, body: bytes, context: grpc.aio.ServicerContext) -> bytes:
        most_s = _POLL_S if method.is_poll else _CALL_S
        left_s = context.time_remaining()
        call: Callable[..., Awaitable[bytes]] = self._channel.unary_unary(f"/{SERVICE}/{name}")
        began_s = time.monotonic()
        answer = await call(body, timeout=most_s if left_s is None else min(most_s, left_s), metadata=self._metadata)
        if not method.is_poll:
            self.metrics.temporal_s.labels(name).observe(time.monotonic() - began_s)
        return answer

    async def _until(self, session: MachineSession, work: Awaitable[bytes]) -> bytes:
        """Returns the result of `work`, unless the key becomes invalid or the gateway stops before.

        Raises:
            Refused: the key is no longer valid, or the gateway stops.
        """
        working = asyncio.ensure_future(work)
        ending = asyncio.create_task(session.ended.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        session.calls += 1
        try:
            await asyncio.wait({working, ending, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if session.ended.is_set():
                raise unauthenticated(f"key {session.key_id} was revoked or has expired; the agent needs a new key")
            if working.done():
                return working.result()
            raise Refused(grpc.StatusCode.UNAVAILABLE, "the gateway stops; retry")
        finally:
            session.calls -= 1
            for task in (working, ending, stopping):
                task.cancel()


@dataclass
class _Counted:
    """The labels under which a call is counted."""

    method: str = "other"
    code: grpc.StatusCode = grpc.StatusCode.CANCELLED
    """By default, the client has ended the call, or its connection was lost."""


async def _body(context: grpc.aio.ServicerContext) -> bytes:
    """Returns the request of a call.

    Raises:
        Refused: it did not arrive in time, or the call ended without it.
    """
    try:
        async with asyncio.timeout(_BODY_S):
            body = await context.read()
    except TimeoutError:
        message = f"the request did not arrive within {_BODY_S:g} seconds"
        raise Refused(grpc.StatusCode.DEADLINE_EXCEEDED, message) from None
    if not isinstance(body, bytes):  # `grpc.aio.EOF`
        raise malformed("the call has no request; must have one")
    return body


def _details(error: grpc.aio.AioRpcError) -> tuple[tuple[str, bytes], ...]:
    """Returns the metadata with Temporal's details of an error, which the SDK reads."""
    trailing = error.trailing_metadata()
    found = None if trailing is None else trailing.get("grpc-status-details-bin")
    return () if found is None else (("grpc-status-details-bin", bytes(found)),)
