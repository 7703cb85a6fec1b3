"""The state of the policies that only replays have."""

from dataclasses import dataclass, field
from typing import Self

from research.spot.knowledge import Knowledge
from services.spot.values import PolicyState


@dataclass(frozen=True)
class ReplayState(PolicyState):
    """What these policies remember in addition."""

    cursor: int = 0
    """The number of launches so far, in round-robin placement."""
    knowledge: Knowledge = field(default_factory=Knowledge)
    """What `spothedge+` has learned about the zones."""

    @classmethod
    def of(cls, state: PolicyState) -> Self:
        """Returns the state of such a policy, which has made it itself."""
        assert isinstance(state, cls)
        return state
