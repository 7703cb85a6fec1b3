"""What mizzen asks of a provider of machines, and the provider's words. `docs/providers.md` says how to write one."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from capacity.offers import Offer


class Refusal(StrEnum):
    """Why a provider launches nothing. The closed list."""

    CAPACITY = "capacity"
    """It has none of these machines there now; others may be had, and these later."""
    QUOTA = "quota"
    """Its customer may not have more of them."""
    REQUEST = "request"
    """It would not take the request at any time: the configuration is wrong."""


class LaunchRefused(Exception):
    """A launch was refused for good: nothing was launched, and the same request is not asked again."""

    def __init__(self, refusal: Refusal, words: str) -> None:
        super().__init__(words)
        self.refusal = refusal
        self.words = words
        """The provider's own."""


class ProviderUnavailable(Exception):
    """The provider did not answer, or answered that it is overloaded: it may or may not have done what it was asked."""


@dataclass(frozen=True)
class LaunchRequest:
    """A machine to be launched. Asked again with the same `instance` it is the same machine."""

    instance: str
    """Its id in the ledger: the provider's client token, and the tag by which the machine is found again."""
    machine: str
    """`region/cluster/machine`, as its agent shall announce it."""
    offer: Offer
    bucket_url: str
    """Of the region's bucket."""
    join_token: str
    """What its agent shows at its first hello. A secret."""


@dataclass(frozen=True)
class Found:
    """A machine that a provider has, by our tag."""

    native_id: str
    """As the provider calls it."""
    instance: str
    """The tag."""
    launched_at_s: float
    """Seconds since the epoch, by the provider's clock."""


class Provider(Protocol):
    """A provider of machines. Its methods block, are called by several threads, and may be called again at any time.

    All of them raise ProviderUnavailable where nothing is known of the outcome.
    """

    name: str
    """As the installation's settings name it."""
    lists_late_s: float
    """For how long after its launch a machine may be missing from the list."""

    def offers(self) -> Sequence[Offer]:
        """What it can launch, with the prices of now. Offers that it would refuse now for want of capacity are among
        them.
        """
        ...

    def launch(self, request: LaunchRequest) -> str:
        """Launches a machine whose agent appears as `request.machine`; returns the provider's own id of it.

        Raises:
            LaunchRefused: nothing was launched.
        """
        ...

    def describe(self) -> Sequence[Found]:
        """The machines that it has by our tags: launched, and neither gone nor on the way to be."""
        ...

    def terminate(self, native_id: str) -> None:
        """Ends a machine, and what it costs. One that is gone, or was never there, is no error."""
        ...
