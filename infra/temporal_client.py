"""Connecting to Temporal: one data converter, one place that knows about TLS and API keys."""

from temporalio.client import Client
from temporalio.runtime import Runtime, TelemetryConfig
from temporalio.service import TLSConfig

from infra.config import TemporalSettings
from infra.errors import ConfigurationError
from infra.payloads import DATA_CONVERTER


def tls_config(settings: TemporalSettings) -> TLSConfig | bool:
    """What the client needs to know of TLS: False, True (the system's roots), or certificates.

    Raises:
        ConfigurationError: a certificate file cannot be read, or a certificate comes without its key.
    """
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise ConfigurationError("temporal.tls_cert and temporal.tls_key go together: give both or none")
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
    """For the whole process, before it connects: its workers do not report on themselves to the service every minute.

    Of thousands of agents that costs the service more than the work that they wait for. A process that has connected
    already stays as it is.
    """
    quiet = Runtime(telemetry=TelemetryConfig(), worker_heartbeat_interval=None)
    Runtime.set_default(quiet, error_if_already_set=False)


async def connect(settings: TemporalSettings) -> Client:
    """A client for the configured service.

    Raises:
        ConfigurationError: no address is configured, or TLS files are unusable.
        RuntimeError: the service cannot be reached.
    """
    if settings.address is None:
        raise ConfigurationError("temporal.address: not set; give host:port of a Temporal service")
    return await Client.connect(
        settings.address,
        namespace=settings.namespace,
        data_converter=DATA_CONVERTER,
        tls=tls_config(settings),
        api_key=settings.api_key,
    )
