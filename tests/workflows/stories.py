"""Lives told by tests: each says beforehand which phases it goes through, for which reasons."""

from collections.abc import Awaitable, Callable
from functools import wraps

from tests.workflows.lab import Life

Story = Callable[..., Awaitable[None]]

PATHS: dict[str, tuple[str, ...]] = {}
"""The path of every story, by its name."""


def goes(*path: str) -> Callable[[Story], Story]:
    """Declares a test's path, `phase reason_code` for each step, which its life must then have gone exactly."""

    def declare(story: Story) -> Story:
        assert story.__name__ not in PATHS, f"two stories are named {story.__name__}"
        PATHS[story.__name__] = path

        @wraps(story)
        async def told(**fixture: Life) -> None:
            (life,) = fixture.values()
            await story(life)
            assert tuple(life.facts.path) == path

        return told

    return declare
