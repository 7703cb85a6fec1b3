"""Records what the policy of a live service observes and decides, and repeats it without a database."""

from dataclasses import dataclass, field

from services.spot.policies import PolicySettings, make_policy
from services.spot.values import Action, Observation, PolicyState, SpotPolicy


@dataclass
class Recording:
    """The observations of one service's policy, with the actions, in order."""

    seen: list[tuple[PolicyState, Observation, tuple[Action, ...]]] = field(default_factory=list)
    """Each with the state that came from the database."""
    made: tuple[str, PolicySettings] | None = None
    """The name and the settings of the policy."""

    def make(self, name: str, settings: PolicySettings) -> SpotPolicy:
        """Returns a policy that records, in place of `services.spot.policies.make_policy`."""
        assert self.made in (None, (name, settings)), "the settings changed during the test"
        self.made = name, settings
        return _Recorded(make_policy(name, settings), self)

    def agrees(self) -> bool:
        """Returns whether a new policy, which keeps its state in memory, has the same states and the same actions.

        A decision whose transaction was rolled back was followed by another one from the same state.
        """
        assert self.made is not None and len(self.seen) > 10
        policy = make_policy(*self.made)
        before = state = policy.start()
        for stored, observation, actions in self.seen:
            if stored != state and stored == before:
                state = before
            before = state
            state, again = policy.decide(state, observation)
            if stored != before or again != actions:
                return False
        return True


@dataclass(frozen=True)
class _Recorded:
    policy: SpotPolicy
    recording: Recording

    def start(self) -> PolicyState:
        return self.policy.start()

    def decide(self, state: PolicyState, observation: Observation) -> tuple[PolicyState, tuple[Action, ...]]:
        after, actions = self.policy.decide(state, observation)
        self.recording.seen.append((state, observation, actions))
        return after, actions
