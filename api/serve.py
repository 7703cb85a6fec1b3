"""Serves the API with uvicorn until SIGINT or SIGTERM."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI
from sqlalchemy.exc import SQLAlchemyError

from api.connections import protocol, websocket_protocol
from infra.certificates import Certificates
from infra.config.settings import Settings
from infra.db.migrate import refuse_unknown
from infra.errors import StackError
from infra.master_key import check_master_key
from infra.memory import collect_seldom
from mizzen_client.tunnel.frames import MAX_FRAME_BYTES

_log = logging.getLogger(__name__)
_HANDSHAKE_S = 10.0
_TICK_S = 1.0
"""Interval at which the `Date` header of responses is updated."""
GRACEFUL_S = 10
"""Timeout for requests in progress at a shutdown; streams end immediately."""


class Server(uvicorn.Server):
    """Uvicorn with a different shutdown.

    Streams are closed at a shutdown; uvicorn alone would wait for them until its timeout. A requested shutdown is not a
    failure, so the signal is not raised again afterwards.
    """

    _told = False
    _wake: Callable[[], object] | None = None
    """Ends the wait in `main_loop`. It may be called from any thread and from a signal handler."""

    @property
    def should_exit(self) -> bool:
        """Whether the server has to stop. May be set from any thread."""
        return self._told

    @should_exit.setter
    def should_exit(self, told: bool) -> None:
        self._told = told
        if told and self._wake is not None:
            self._wake()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`. Limits the time of a TLS handshake, which uvicorn gives a minute."""
        if self.config.is_ssl:
            loop = asyncio.get_running_loop()
            limited = partial(loop.create_server, ssl_handshake_timeout=_HANDSHAKE_S)
            loop.create_server = limited  # type: ignore[method-assign]
        await super().startup(sockets)

    async def main_loop(self) -> None:
        """Runs until `should_exit` is set. Uvicorn's loop polls the flag, which was most of the CPU time when idle."""
        stopping = asyncio.Event()
        self._wake = partial(asyncio.get_running_loop().call_soon_threadsafe, stopping.set)
        try:
            while not await self.on_tick(0):
                with suppress(TimeoutError):
                    async with asyncio.timeout(_TICK_S):
                        await stopping.wait()
        finally:
            self._wake = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Starts a shutdown at the first signal; at a second SIGINT, does not wait for requests in progress."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        app = self.config.app
        state = getattr(app, "state", None)
        if state is not None:
            state.mizzen.hub.close()
            await state.mizzen.relays.end_all()
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket; port 0 selects a free port.

    Raises:
        StackError: the port is in use, or the host is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        raise StackError(
            f"api.port: port {port} on {host} is not free ({error.strerror}); stop what uses it or choose another port"
        ) from None
    # Accepted connections inherit this option; asyncio sets it only on sockets with an explicit protocol number.
    # Without it, the second part of a response waits about 40 ms for the client's acknowledgement of the first.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def config_of(app: FastAPI, settings: Settings, graceful_s: int = GRACEFUL_S) -> uvicorn.Config:
    """Returns uvicorn's configuration for `app`. `graceful_s`: how long a shutdown waits for requests in progress.

    Raises:
        ConfigurationError: the TLS files are unusable.
    """
    api = settings.api
    tls = None if api.tls_cert is None or api.tls_key is None else Certificates(api.tls_cert, api.tls_key)
    return uvicorn.Config(
        app,
        http=protocol(settings.limits, settings.api.trusted_proxies),
        ws=websocket_protocol(settings.limits),
        ws_max_size=MAX_FRAME_BYTES,
        ws_per_message_deflate=False,
        log_config=None,
        access_log=False,
        server_header=False,
        # By default uvicorn trusts these headers from every process on this machine.
        proxy_headers=bool(settings.api.trusted_proxies),
        forwarded_allow_ips=list(settings.api.trusted_proxies),
        timeout_graceful_shutdown=graceful_s,
        h11_max_incomplete_event_size=64 << 10,
        ssl_context_factory=None if tls is None else lambda *_: tls.context(),
    )


def serve(create_app: Callable[[Settings], FastAPI], settings: Settings, listener: socket.socket | None = None) -> None:
    """Serves the application until SIGINT or SIGTERM, on `listener` or, without one, on the configured host and port.

    Raises:
        StackError: the port is in use.
        ConfigurationError: the settings contain no database URL, the database belongs to another version, the master
            key does not decrypt its secrets, or the TLS files are unusable.
    """
    app = create_app(settings)
    config = config_of(app, settings)
    try:
        refuse_unknown(app.state.mizzen.engine)
        check_master_key(app.state.mizzen.engine, settings.master_key_path)
    except SQLAlchemyError as error:
        # Postgres may become available later; `/readyz` and `put_secret` repeat the checks.
        _log.warning("the schema of the database and the master key could not be checked: %s", error)
    listener = listener or listen(settings.api.host, settings.api.port)
    collect_seldom()
    with listener:
        Server(config).run(sockets=[listener])
