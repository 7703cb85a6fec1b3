"""Serving the API with uvicorn until SIGINT or SIGTERM."""

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

from api.app import create_app
from api.connections import protocol
from infra.config import Settings
from infra.errors import StackError
from infra.master_key import check_master_key
from infra.memory import collect_seldom

_log = logging.getLogger(__name__)
_TICK_S = 1.0
"""How often the date of answers is renewed."""
GRACEFUL_S = 10
"""How long requests that are being answered may take at a shutdown; streams end at once."""


class Server(uvicorn.Server):
    """Uvicorn, with shutdowns of our own.

    Streams are told of one: uvicorn would wait for them, and they would go on. One that was asked for is no failure,
    so the signal is not raised again at its end.
    """

    _told = False
    _wake: Callable[[], object] | None = None
    """Ends the wait of `main_loop`, from any thread and from a signal's handler."""

    @property
    def should_exit(self) -> bool:
        """Whether to stop. May be set from any thread."""
        return self._told

    @should_exit.setter
    def should_exit(self, told: bool) -> None:
        self._told = told
        if told and self._wake is not None:
            self._wake()

    async def main_loop(self) -> None:
        """Runs until `should_exit` is set. Uvicorn's own loop polls it, which was most of an idle API's CPU time."""
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
        """The first signal asks for a shutdown; a second Ctrl-C does not wait for what is being answered."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        app = self.config.app
        state = getattr(app, "state", None)
        if state is not None:
            state.mizzen.hub.close()
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any that is free.

    Raises:
        StackError: the port is taken, or the host is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        raise StackError(
            f"api.port: port {port} on {host} is not free ({error.strerror}); stop what uses it or choose another port"
        ) from None
    # Accepted connections inherit it. Asyncio sets it only on sockets whose protocol number is given, and without it
    # the second part of an answer waits some 40 ms for the client's acknowledgement of the first.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def config_of(app: FastAPI, settings: Settings, graceful_s: int = GRACEFUL_S) -> uvicorn.Config:
    """How uvicorn serves `app`; `graceful_s` is how long a shutdown waits for answers."""
    return uvicorn.Config(
        app,
        http=protocol(settings.limits),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        # By default uvicorn believes these headers of any process on this machine.
        proxy_headers=bool(settings.api.trusted_proxies),
        forwarded_allow_ips=list(settings.api.trusted_proxies),
        timeout_graceful_shutdown=graceful_s,
        h11_max_incomplete_event_size=64 << 10,
    )


def serve(settings: Settings, listener: socket.socket | None = None) -> None:
    """Serves until SIGINT or SIGTERM, on `listener` or else on the configured host and port.

    Raises:
        StackError: the port is taken.
        ConfigurationError: there is no URL of a database, or the master key does not open its secrets.
    """
    app = create_app(settings)
    try:
        check_master_key(app.state.mizzen.engine, settings.master_key_path)
    except SQLAlchemyError as error:
        # Postgres may come later; `put_secret` looks again.
        _log.warning("the master key could not be compared with the database's secrets: %s", error)
    listener = listener or listen(settings.api.host, settings.api.port)
    collect_seldom()
    with listener:
        Server(config_of(app, settings)).run(sockets=[listener])
