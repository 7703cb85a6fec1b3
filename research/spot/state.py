"""The state of the policies that only replays have."""

from dataclasses import dataclass
from typing import Self

from services.spot.values import PolicyState


@dataclass(frozen=True)
class ReplayState(PolicyState):
    """The additional state of these policies."""

    cursor: int = 0
    """The number of launches so far, in round-robin placement."""

    @classmethod
    def of(cls, state: PolicyState) -> Self:
        """Returns the state of such a policy, which has made it itself."""
        assert isinstance(state, cls)
        return state
