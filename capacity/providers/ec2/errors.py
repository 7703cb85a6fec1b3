"""Classifies EC2's errors: no capacity, quota used up, invalid request, or unknown outcome."""

from collections.abc import Iterator
from contextlib import contextmanager

from botocore.exceptions import BotoCoreError, ClientError

from capacity.provider import LaunchRefused, ProviderUnavailable, Refusal

_CAPACITY = {
    "InsufficientInstanceCapacity", "InsufficientHostCapacity", "InsufficientReservedInstanceCapacity",
    "InsufficientCapacity", "SpotMaxPriceTooLow",
}  # fmt: skip
_QUOTA = {
    "MaxSpotInstanceCountExceeded", "InstanceLimitExceeded", "VcpuLimitExceeded", "InsufficientFreeAddressesInSubnet",
}  # fmt: skip
_NOTHING_CERTAIN = {
    "RequestLimitExceeded", "Throttling", "ThrottlingException", "RequestThrottled", "EC2ThrottledException",
    "InternalError", "InternalFailure", "Unavailable", "ServiceUnavailable", "RequestExpired",
    # Wrong credentials may be corrected soon, and do not depend on the offer.
    "AuthFailure", "UnauthorizedOperation", "ExpiredToken", "RequestTimeout", "InvalidClientTokenId",
    "UnrecognizedClientException", "OptInRequired", "Blocked", "PendingVerification",
}  # fmt: skip
NOT_THERE = {"InvalidInstanceID.NotFound", "InvalidInstanceID.Malformed", "InvalidParameterValue", "MissingParameter"}
"""Error codes of TerminateInstances for an instance that never existed."""


@contextmanager
def asking(name: str, what: str) -> Iterator[None]:
    """Converts errors of EC2 calls whose outcome is unknown after a failure. `what` names the operation.

    Raises:
        ProviderUnavailable: a call failed.
    """
    try:
        yield
    except (ClientError, BotoCoreError) as error:
        raise ProviderUnavailable(f"{name}: {what}: {error}") from None


@contextmanager
def launching(name: str) -> Iterator[None]:
    """Converts errors of a launch.

    Raises:
        LaunchRefused: EC2 refused the launch, so nothing was launched.
        ProviderUnavailable: the instance may have been launched.
    """
    try:
        yield
    except ClientError as error:
        code, words = code_of(error), str(error.response.get("Error", {}).get("Message", error))
        if code in _CAPACITY:
            raise LaunchRefused(Refusal.CAPACITY, f"{code}: {words}") from None
        if code in _QUOTA:
            raise LaunchRefused(Refusal.QUOTA, f"{code}: {words}") from None
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500))
        if code in _NOTHING_CERTAIN or status >= 500:
            raise ProviderUnavailable(f"{name}: launching: {error}") from None
        raise LaunchRefused(Refusal.REQUEST, f"{code}: {words}") from None
    except BotoCoreError as error:
        raise ProviderUnavailable(f"{name}: launching: {error}") from None


def code_of(error: ClientError) -> str:
    """Returns the EC2 error code."""
    return str(error.response.get("Error", {}).get("Code", ""))
