"""The exceptions of the simulator."""

from infra.errors import MizzenError


class SimulationError(MizzenError):
    """A decision is impossible, such as a plan that takes slots that another workload holds."""
