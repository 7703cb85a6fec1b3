"""Connects to Temporal with the configured TLS files and API key, and with mizzen's data converter."""

import dataclasses
import re

from temporalio.client import Client
from temporalio.converter import DataConverter, DefaultFailureConverterWithEncodedAttributes
from temporalio.runtime import LoggingConfig, Runtime, TelemetryConfig, TelemetryFilter
from temporalio.service import DnsLoadBalancingConfig, HttpConnectProxyConfig, RPCError, RPCStatusCode, TLSConfig

from infra.config.services import TemporalSettings
from infra.errors import ConfigurationError
from infra.payload_codec import EncryptingCodec, PlainCodec
from infra.payload_keys import PayloadKeys
from infra.payloads import DATA_CONVERTER

UI_PATH = "/temporal"
"""Path of the embedded Temporal's UI below the URL of the API."""
CODEC_PATH = f"{UI_PATH}/codec"
"""Path of the codec that decrypts payloads for the UI."""
UNIX = "unix:"
"""Start of the address of a Unix socket."""
_REFUSED = re.compile(r'Status \{ code: (?:Unauthenticated|PermissionDenied), message: "((?:[^"\\]|\\.)*)"')
"""Pattern of the SDK's message for a refused first call, for which it has no exception type."""
_has_runtime = False


def refusal(error: BaseException) -> str | None:
    """Returns why the service, or its gateway, refuses this client's key; None: the error has another cause."""
    if isinstance(error, RPCError):
        refused = error.status in (RPCStatusCode.UNAUTHENTICATED, RPCStatusCode.PERMISSION_DENIED)
        return error.message if refused else None
    found = _REFUSED.search(str(error)) if isinstance(error, RuntimeError) else None
    return None if found is None else re.sub(r"\\(.)", r"\1", found[1])


def tls_config(settings: TemporalSettings) -> TLSConfig | bool:
    """Returns the TLS argument of the client: False, True (the system's root certificates), or certificates.

    Raises:
        ConfigurationError: a certificate file cannot be read, or only one of certificate and key is configured.
    """
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise ConfigurationError("temporal.tls_cert and temporal.tls_key go together: set both or neither")
    if settings.tls_ca is None and settings.tls_cert is None:
        return settings.tls or settings.api_key is not None
    try:
        return TLSConfig(
            server_root_ca_cert=settings.tls_ca.read_bytes() if settings.tls_ca else None,
            client_cert=settings.tls_cert.read_bytes() if settings.tls_cert else None,
            client_private_key=settings.tls_key.read_bytes() if settings.tls_key else None,
        )
    except OSError as error:
        raise ConfigurationError(f"temporal: TLS file {error.filename}: {error.strerror}") from None


def use_quiet_runtime() -> None:
    """Disables the status reports that workers of this process send to the service every minute.

    With thousands of agents these reports cost the service more than the agents' work. Must be called before the
    process connects; otherwise it has no effect.
    """
    _set_runtime(is_quiet=True)


def _set_runtime(*, is_quiet: bool) -> None:
    """Sets the runtime of this process once: each runtime has a thread pool, and a later one would replace it."""
    global _has_runtime
    if _has_runtime:
        return
    _has_runtime = True
    shown = _telemetry()
    runtime = Runtime(telemetry=shown, worker_heartbeat_interval=None) if is_quiet else Runtime(telemetry=shown)
    Runtime.set_default(runtime, error_if_already_set=False)


def _telemetry() -> TelemetryConfig:
    """Returns the SDK's default, without its warning at each connection that a Unix socket has no name in the DNS."""
    default = TelemetryFilter(core_level="WARN", other_level="ERROR").formatted()
    return TelemetryConfig(logging=LoggingConfig(f"{default},temporal_sdk_bridge::client=ERROR"))


def payload_codec(settings: TemporalSettings) -> EncryptingCodec | None:
    """Returns the codec that encrypts the payloads in Temporal; None: they are not encrypted.

    Raises:
        ConfigurationError: the file with the keys is unusable.
    """
    return None if settings.payload_keys is None else EncryptingCodec(PayloadKeys(settings.payload_keys))


def data_converter(settings: TemporalSettings) -> DataConverter:
    """Returns mizzen's data converter, which encrypts payloads and the texts of failures if keys are configured.

    Raises:
        ConfigurationError: the file with the keys is unusable.
    """
    codec = payload_codec(settings)
    if codec is None:
        return dataclasses.replace(DATA_CONVERTER, payload_codec=PlainCodec())
    failures = DefaultFailureConverterWithEncodedAttributes
    return dataclasses.replace(DATA_CONVERTER, payload_codec=codec, failure_converter_class=failures)


async def connect(settings: TemporalSettings) -> Client:
    """Connects to the configured service and returns the client.

    Raises:
        ConfigurationError: no address is configured, or the TLS files or the payload keys are unusable.
        RuntimeError: the service cannot be reached.
    """
    if settings.address is None:
        raise ConfigurationError("temporal.address: is not set; must be host:port of a Temporal service, or unix:PATH")
    is_socket = settings.address.startswith(UNIX)
    _set_runtime(is_quiet=False)
    return await Client.connect(
        "127.0.0.1:7233" if is_socket else settings.address,
        namespace=settings.namespace,
        data_converter=data_converter(settings),
        tls=tls_config(settings),
        api_key=settings.api_key,
        # The SDK connects to a Unix socket only as the address of a proxy, for which it sends an HTTP request first.
        http_connect_proxy_config=HttpConnectProxyConfig(target_host=settings.address) if is_socket else None,
        dns_load_balancing_config=None if is_socket else DnsLoadBalancingConfig.default,
    )
