"""Tests of workloads that declare the exact path of phases and reasons."""

from collections.abc import Awaitable, Callable
from functools import wraps

from tests.workflows.lab import Life

Story = Callable[..., Awaitable[None]]

PATHS: dict[str, tuple[str, ...]] = {}
"""The declared path of every test, by its name."""


def goes(*path: str) -> Callable[[Story], Story]:
    """Declares a test's exact path, with `phase reason_code` for each step; the path is checked at the end."""

    def declare(story: Story) -> Story:
        assert story.__name__ not in PATHS, f"two tests are named {story.__name__}"
        PATHS[story.__name__] = path

        @wraps(story)
        async def told(**fixture: Life) -> None:
            (life,) = fixture.values()
            await story(life)
            assert tuple(life.facts.path) == path

        return told

    return declare
