"""The exceptions of the simulator."""

from infra.errors import ConfigurationError, MizzenError


class TraceError(ConfigurationError):
    """A trace cannot be read, or has bad rows; the message lists them."""


class SimulationError(MizzenError):
    """A decision is impossible, such as a plan that takes slots that another workload holds."""
