"""Machines that nobody launched: their agents were started by their owners. They come and go as they like."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from capacity.offers import Offer
from capacity.providers import Found, LaunchRefused, LaunchRequest, Refusal
from infra.config import Settings


class SettingsOf(BaseModel):
    """There is nothing to say."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StaticProvider:
    """Offers nothing, and has nothing that could be ended."""

    lists_late_s = 0.0

    def __init__(self, name: str) -> None:
        self.name = name

    def offers(self) -> Sequence[Offer]:
        """See `Provider.offers`."""
        return ()

    def launch(self, request: LaunchRequest) -> str:
        """See `Provider.launch`."""
        raise LaunchRefused(Refusal.REQUEST, "nobody launches static machines: start an agent on one (`mizzen agent`)")

    def describe(self) -> Sequence[Found]:
        """See `Provider.describe`."""
        return ()

    def terminate(self, native_id: str) -> None:
        """See `Provider.terminate`."""


def open_provider(name: str, _settings: SettingsOf, _installation: Settings) -> StaticProvider:
    """The provider."""
    return StaticProvider(name)
