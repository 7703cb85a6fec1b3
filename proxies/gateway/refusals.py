"""Refusals of calls, with gRPC's status codes."""

import grpc

from infra.errors import MizzenError


class Refused(MizzenError):
    """The gateway refuses a call. The message names what is refused and what would be valid."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def denied(message: str) -> Refused:
    """Returns the refusal of a call that the caller's key does not allow."""
    return Refused(grpc.StatusCode.PERMISSION_DENIED, message)


def malformed(message: str) -> Refused:
    """Returns the refusal of a request that cannot be read."""
    return Refused(grpc.StatusCode.INVALID_ARGUMENT, message)


def unauthenticated(message: str) -> Refused:
    """Returns the refusal of a call without a valid key."""
    return Refused(grpc.StatusCode.UNAUTHENTICATED, message)
