"""The provider of static machines. Mizzen does not launch or terminate them: their owners start and stop the agents."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from capacity.offers import Offer
from capacity.provider import FoundMachine, LaunchRefused, LaunchRequest, Refusal
from infra.config.settings import Settings


class SettingsOf(BaseModel):
    """The settings of the static provider: it has none."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StaticProvider:
    """A provider without offers, which neither launches nor terminates machines."""

    lists_late_s = 0.0
    queues = False
    impaired = ""

    def __init__(self, name: str) -> None:
        self.name = name

    def offers(self) -> Sequence[Offer]:
        """See `Provider.offers`."""
        return ()

    def launch(self, request: LaunchRequest) -> str:
        """See `Provider.launch`."""
        raise LaunchRefused(Refusal.REQUEST, "static machines cannot be launched: start `mizzen agent` on the machine")

    def describe(self) -> Sequence[FoundMachine]:
        """See `Provider.describe`."""
        return ()

    def terminate(self, native_id: str) -> None:
        """See `Provider.terminate`."""


def open_provider(name: str, _settings: SettingsOf, _installation: Settings) -> StaticProvider:
    """Returns the provider of static machines."""
    return StaticProvider(name)
