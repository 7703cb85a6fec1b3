"""The interface of a machine provider, and its errors. `docs/providers.md` explains how to write a provider."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from capacity.offers import Offer


class Refusal(StrEnum):
    """Why a provider refuses a launch. The list is closed."""

    CAPACITY = "capacity"
    """The zone has no such machine now. Other offers may be available, and this one later."""
    QUOTA = "quota"
    """The account's quota is used up."""
    REQUEST = "request"
    """The provider would never accept the request: the configuration is wrong."""


class LaunchRefused(Exception):
    """A launch was refused permanently: nothing was launched, and the request is not repeated."""

    def __init__(self, refusal: Refusal, words: str) -> None:
        super().__init__(words)
        self.refusal = refusal
        self.words = words
        """The provider's error message."""


class ProviderUnavailable(Exception):
    """The provider did not answer or is overloaded. Whether the request was carried out is unknown."""


@dataclass(frozen=True)
class LaunchRequest:
    """A request to launch a machine. A repeated request with the same `instance` yields the same machine."""

    instance: str
    """The instance's id in the ledger: the client token of the request, and the tag of the machine."""
    machine: str
    """The name that the agent must announce, as `region/cluster/machine`."""
    offer: Offer
    bucket_url: str
    """The URL of the region's bucket."""
    join_token: str
    """The token that the agent must present in its first hello. A secret. Empty: the machine is not in the ledger."""
    machine_key: str
    """The API key with which the agent may use the gateway to Temporal. A secret."""


@dataclass(frozen=True)
class FoundMachine:
    """A machine in a provider's list that carries mizzen's tag."""

    native_id: str
    """The provider's id of the machine."""
    instance: str
    """The tag: the id of the instance in the ledger."""
    launched_at_s: float
    """Seconds since the epoch, by the provider's clock."""
    waits: str | None = None
    """Why the provider has not started the machine yet, in its words; None: it has started it."""
    starts_at_s: float | None = None
    """When the provider expects to start a machine that waits, in seconds since the epoch; None: unknown."""
    ends_at_s: float | None = None
    """When the provider will end the machine, in seconds since the epoch; None: unknown. It may change."""
    ends_because: str | None = None
    """Why it ends then, in words; None: its allocation ends."""
    leaves: str | None = None
    """Why the provider wants the machine to be left although it still runs; None: it does not."""
    ended: str | None = None
    """Why the machine has ended, for people; None: it exists. A provider lists an ended machine as long as it can."""


class Provider(Protocol):
    """A provider of machines. Its methods block, are called from several threads, and may be repeated at any time.

    All methods raise ProviderUnavailable if the outcome is unknown.
    """

    name: str
    """The provider's name in the installation's settings."""
    lists_late_s: float
    """The time after its launch for which a machine may be missing from the list."""
    queues: bool
    """Whether a launched machine may wait at the provider before it starts, for minutes or days."""
    impaired: str
    """What fails although the provider lists its machines, such as a watch that it refuses; empty: nothing is known."""

    def offers(self) -> Sequence[Offer]:
        """Returns the machines that the provider can launch, with current prices.

        Offers for which the provider has no capacity at the moment are included.
        """
        ...

    def launch(self, request: LaunchRequest) -> str:
        """Launches a machine whose agent announces itself as `request.machine`; returns the provider's id of it.

        Raises:
            LaunchRefused: nothing was launched.
        """
        ...

    def describe(self) -> Sequence[FoundMachine]:
        """Returns the machines that this installation launched, with those that ended recently, whose `ended` is set.

        A machine that is terminating has ended, or is left out. A machine that is not in the list does not exist any
        more.
        """
        ...

    def terminate(self, native_id: str) -> None:
        """Terminates a machine. A machine that is already gone or never existed is not an error."""
        ...
