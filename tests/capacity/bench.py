"""A provider for the conformance tests."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from capacity.provider import Provider


@dataclass(frozen=True)
class Bench:
    """A provider with at least two offers of at most three machines each, or without offers."""

    provider: Provider
    away: Callable[[], AbstractContextManager[None]]
    """A context in which the provider does not respond."""
