"""What can go wrong in a simulation."""

from infra.errors import ConfigurationError, MizzenError


class TraceError(ConfigurationError):
    """A trace that cannot be read, or rows of it that say something that cannot be; each is named."""


class SimulationError(MizzenError):
    """The decisions broke a rule of the world: a plan that takes what another holds."""
