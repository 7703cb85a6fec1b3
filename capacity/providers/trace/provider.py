"""The provider for a cloud that follows traces."""

import math
from collections.abc import Sequence

from capacity.offers import Offer
from capacity.provider import FoundMachine, LaunchRefused, LaunchRequest, ProviderUnavailable, Refusal
from capacity.providers.registry import providers_of
from capacity.providers.trace.cloud import Cloud, CloudMachine
from capacity.providers.trace.market import MarketInstance, offers_of
from capacity.providers.trace.settings import TraceProviderSettings
from infra.config.settings import Settings
from infra.machine_shape import MachineShape


class TraceProvider:
    """Launches machines of a cloud that follows traces."""

    lists_late_s = 0.0
    queues = False
    impaired = ""

    def __init__(self, name: str, settings: TraceProviderSettings, cloud: Cloud) -> None:
        self.name = name
        self._settings = settings
        self._cloud = cloud

    def offers(self) -> Sequence[Offer]:
        """See `Provider.offers`."""
        return offers_of(self.name, self._settings)

    def launch(self, request: LaunchRequest) -> str:
        """See `Provider.launch`."""
        offer = request.offer
        if offer.zone not in self._settings.zones or offer.shape.machine_type not in self._settings.machine_types:
            raise LaunchRefused(Refusal.REQUEST, f"no {offer.shape.machine_type} in zone {offer.zone} in the settings")

        of = self._settings.machine_types[offer.shape.machine_type]
        shape = {field: getattr(of, field) for field in MachineShape.model_fields}

        def make(instance: MarketInstance, number: int) -> CloudMachine:
            return CloudMachine(
                instance, number, request.machine, offer.region, offer.shape.machine_type, shape,
                request.bucket_url,
                request.join_token, request.machine_key,
            )  # fmt: skip

        try:
            machine = self._cloud.launch(request.instance, offer.zone, make)
        except OSError as error:
            raise ProviderUnavailable(f"{self.name}: {error}") from None
        if machine is None:
            raise LaunchRefused(Refusal.CAPACITY, f"zone {offer.zone} has no machine left")
        return machine.instance.native_id

    def describe(self) -> Sequence[FoundMachine]:
        """See `Provider.describe`."""
        try:
            there = [machine.instance for machine in self._cloud.there()]
        except OSError as error:
            raise ProviderUnavailable(f"{self.name}: {error}") from None
        return [
            FoundMachine(
                one.native_id,
                one.token,
                one.launched_at_s,
                ends_at_s=None if math.isinf(one.ends_at_s) else one.ends_at_s,
            )
            for one in there
        ]

    def terminate(self, native_id: str) -> None:
        """See `Provider.terminate`."""
        try:
            self._cloud.end(native_id)
        except OSError as error:
            raise ProviderUnavailable(f"{self.name}: {error}") from None


def _cloud(name: str, settings: TraceProviderSettings, installation: Settings) -> Cloud:
    return Cloud(settings, installation.data_dir / "providers" / name)


def open_clouds(installation: Settings) -> list[Cloud]:
    """Returns the clouds of an installation. Only the process that runs their agents calls this.

    Raises:
        ConfigurationError: the settings of a cloud are not valid.
    """
    found = providers_of(installation, "trace")
    return [_cloud(name, settings, installation) for name, settings in found.items()]


def open_provider(name: str, settings: TraceProviderSettings, installation: Settings) -> TraceProvider:
    """Returns the provider. Its cloud's state is in the installation's data folder."""
    return TraceProvider(name, settings, _cloud(name, settings, installation))
