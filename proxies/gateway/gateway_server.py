"""Runs the gateway: listens with TLS, connects to Temporal, and follows the revocation of keys."""

import asyncio
import logging
import os
import resource
import signal
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from wsgiref.simple_server import WSGIServer

import grpc
from sqlalchemy.exc import SQLAlchemyError
from temporalio.service import TLSConfig

from infra.config.services import TemporalSettings
from infra.config.settings import Settings
from infra.db.migrate import refuse_unknown
from infra.db.session import open_engine
from infra.errors import ConfigurationError
from infra.liveness_pipe import LivenessReporter
from infra.metrics import serve_metrics
from infra.temporal_client import payload_codec, tls_config
from proxies.gateway import limits
from proxies.gateway.connections import Connections
from proxies.gateway.keys import Sessions
from proxies.gateway.proxy import Gateway
from proxies.gateway.task_tokens import TaskTokens

_STOP_S = 5.0
_SCHEMA_S = 5.0
"""Timeout of the check of the database's revision at the start."""
_CONNECTIONS = 3
_SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", limits.MAX_REQUEST_BYTES),
    ("grpc.max_metadata_size", limits.MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", limits.MAX_METADATA_BYTES),
    ("grpc.max_concurrent_streams", limits.MAX_STREAMS),
    # A second gateway on the same port is an error, not a silent share of the connections.
    ("grpc.so_reuseport", 0),
    # The SDK sends a ping every 30 s while it polls; by default the server would close such a connection.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A connection without calls is closed. Agents always have a poll in progress.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 60_000),
    # The poll of an agent that is gone ends soon, before Temporal gives it a task.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 15_000),
)
_log = logging.getLogger(__name__)


@dataclass
class Certificate:
    """The server's certificate chain and private key, in PEM files. Changed files are used for new connections."""

    chain: Path
    key: Path

    def credentials(self) -> grpc.ServerCredentials:
        """Returns the credentials of the server.

        Raises:
            ConfigurationError: a file cannot be read, or the key does not belong to the certificate.
        """
        try:
            self._pem = self._read()
            self._check(self._pem)
        except OSError as error:
            raise ConfigurationError(f"--tls-cert {self.chain}, --tls-key {self.key}: {error}") from None
        return grpc.dynamic_ssl_server_credentials(_configuration(self._pem), self._changed, False)

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Returns the new certificate, if the files have changed. gRPC calls this for each new connection."""
        try:
            pem = self._read()
            if pem == self._pem:
                return None
            self._check(pem)
        except OSError as error:
            _log.warning("the new certificate cannot be used; the earlier one stays in use: %s", error)
            return None
        self._pem = pem
        return _configuration(pem)

    def _read(self) -> tuple[bytes, bytes]:
        return self.key.read_bytes(), self.chain.read_bytes()

    def _check(self, pem: tuple[bytes, bytes]) -> None:
        """Checks that the files still contain `pem`, and that key and certificate belong together.

        Raises:
            OSError: they do not, for example because only one of the files has been replaced so far.
        """
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.chain, self.key)
        if self._read() != pem:
            raise OSError("the files are being changed")


async def serve(
    settings: Settings,
    listen: str,
    certificate: Certificate,
    stop: asyncio.Event,
    port: asyncio.Future[int] | None = None,
    *,
    connections_per_address: int = limits.CONNECTIONS_PER_ADDRESS,
    metrics: tuple[str, int] | None = None,
) -> None:
    """Serves agents on the address `listen` (host:port) until `stop` is set. `port` gets the number of the port.

    `metrics` is the host and port of the metrics; None: none are served.

    Raises:
        ConfigurationError: a setting is missing or invalid, the database belongs to another version, or the address
            cannot be used.
        StackError: the address of the metrics cannot be used.
    """
    if settings.database is None:
        raise ConfigurationError("--database: not set; give the URL of the installation's Postgres")
    tokens = TaskTokens.of_installation(settings.master_key_path)
    credentials = certificate.credentials()
    engine = open_engine(settings.database, pool_size=_CONNECTIONS, application="mizzen gateway")
    sessions = Sessions(engine)
    channel = _channel(settings.temporal)
    checking = asyncio.create_task(sessions.check())
    limiting: asyncio.Task[None] | None = None
    metrics_server: WSGIServer | None = None
    try:
        temporal = settings.temporal
        gateway = Gateway(channel, _metadata(temporal), temporal.namespace, sessions, tokens, payload_codec(temporal))
        with suppress(SQLAlchemyError, TimeoutError):  # Postgres may become available later.
            async with asyncio.timeout(_SCHEMA_S):
                await asyncio.to_thread(refuse_unknown, engine)
        await sessions.list_keys()
        server = grpc.aio.server(options=_SERVER_OPTIONS, maximum_concurrent_rpcs=limits.MAX_CALLS)
        server.add_generic_rpc_handlers((gateway,))
        try:
            bound = server.add_secure_port(listen, credentials)
        except RuntimeError as error:
            raise ConfigurationError(f"--listen: {listen!r}: {error}; must be host:port of this computer") from None
        if metrics is not None:
            metrics_server, _ = serve_metrics(*metrics, gateway.metrics)
        await server.start()
        connections = gateway.metrics.connections = Connections(bound, connections_per_address)
        limiting = asyncio.create_task(connections.run())
        _log.info("listening on %s", listen)
        if port is not None:
            port.set_result(bound)
        stopping = asyncio.create_task(stop.wait())
        # Without the checks no revocation takes effect, and without the limit one address can take all connections: the
        # process then ends with the error.
        await asyncio.wait({checking, limiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        gateway.stop()
        await server.stop(_STOP_S)
        for task in (checking, limiting):
            if task.done():
                task.result()
    finally:
        checking.cancel()
        if limiting is not None:
            limiting.cancel()
        if metrics_server is not None:
            await asyncio.to_thread(metrics_server.shutdown)
            metrics_server.server_close()
        await channel.close()
        await asyncio.to_thread(sessions.close)
        engine.dispose()


def run_gateway(
    settings: Settings,
    listen: str,
    certificate: Certificate,
    *,
    connections_per_address: int,
    metrics: tuple[str, int] | None,
) -> None:
    """Runs `serve` until SIGTERM or SIGINT. Blocks.

    Raises:
        ConfigurationError, StackError: see `serve`.
    """
    # Each connection is an open file. The usual soft limit is 1024.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Otherwise gRPC writes a line for each failed handshake, which anyone can cause. It reads this at its first use.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

    async def until_signalled() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        reporting = asyncio.create_task(LivenessReporter.inherited().go_on())
        await serve(
            settings, listen, certificate, stop, connections_per_address=connections_per_address, metrics=metrics
        )
        reporting.cancel()

    asyncio.run(until_signalled())


def _configuration(pem: tuple[bytes, bytes]) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([pem])


def _channel(settings: TemporalSettings) -> grpc.aio.Channel:
    """Returns the connection to Temporal, which is established again whenever it is lost.

    Raises:
        ConfigurationError: no address is configured, or the TLS files are unusable.
    """
    if settings.address is None:
        raise ConfigurationError("temporal.address: is not set; must be host:port of a Temporal service")
    tls = tls_config(settings)
    if tls is False:
        return grpc.aio.insecure_channel(settings.address, options=_CHANNEL_OPTIONS)
    given = tls if isinstance(tls, TLSConfig) else TLSConfig()
    credentials = grpc.ssl_channel_credentials(given.server_root_ca_cert, given.client_private_key, given.client_cert)
    return grpc.aio.secure_channel(settings.address, credentials, options=_CHANNEL_OPTIONS)


def _metadata(settings: TemporalSettings) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of calls to Temporal. The agent's own metadata is not forwarded."""
    namespace = (("temporal-namespace", settings.namespace),)
    return namespace if settings.api_key is None else (*namespace, ("authorization", f"Bearer {settings.api_key}"))
