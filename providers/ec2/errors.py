"""What EC2's errors mean: no machine is left, none is allowed, the request is wrong, or nothing is certain."""

from collections.abc import Iterator
from contextlib import contextmanager

from botocore.exceptions import BotoCoreError, ClientError

from capacity.providers import LaunchRefused, ProviderUnavailable, Refusal

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
    # Credentials that are wrong now may be right soon; no machine is to blame, and no offer.
    "AuthFailure", "UnauthorizedOperation", "ExpiredToken", "RequestTimeout", "InvalidClientTokenId",
    "UnrecognizedClientException", "OptInRequired", "Blocked", "PendingVerification",
}  # fmt: skip
NOT_THERE = {"InvalidInstanceID.NotFound", "InvalidInstanceID.Malformed", "InvalidParameterValue", "MissingParameter"}
"""What ending an instance that there never was answers."""


@contextmanager
def asking(name: str, what: str) -> Iterator[None]:
    """Around calls of which nothing is known if they fail.

    Raises:
        ProviderUnavailable: they failed.
    """
    try:
        yield
    except (ClientError, BotoCoreError) as error:
        raise ProviderUnavailable(f"{name}: {what}: {error}") from None


@contextmanager
def launching(name: str) -> Iterator[None]:
    """Around a launch.

    Raises:
        LaunchRefused: EC2 says that it launched nothing, and why.
        ProviderUnavailable: it may have.
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
    """EC2's code of an error."""
    return str(error.response.get("Error", {}).get("Code", ""))
