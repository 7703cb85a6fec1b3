"""Loops that one process of an installation runs: which process runs them, and how long they pause."""

import asyncio
from functools import partial

import pytest
from sqlalchemy import text

from activities.leader import lead
from tests.activities.temporal import until
from tests.activities.world import World


async def test_one_process_does_the_rounds(town: World) -> None:
    """Of two processes only the leader runs rounds, even if they fail; the other takes over when the leader ends."""
    done: list[str] = []

    async def works(name: str) -> None:
        done.append(name)
        raise RuntimeError("Temporal is away")

    def process(name: str) -> asyncio.Task[None]:
        return asyncio.create_task(lead(town.engine, 7, "a test", partial(works, name), 0.01))

    first = process("first")
    await until(lambda: len(done) >= 3, "rounds")
    second = process("second")
    await until(lambda: len(done) >= 30, "more rounds")
    assert set(done) == {"first"}
    await asyncio.to_thread(_end_holders_of_locks, town)
    await until(lambda: len(done) >= 60, "one goes on")
    first.cancel()
    await asyncio.wait([first])
    del done[:]
    await until(lambda: len(done) >= 3, "the other takes its place")
    assert set(done) == {"second"}
    second.cancel()
    await asyncio.wait([second])


@pytest.mark.parametrize("fails", [True, False], ids=["fails", "ends late"])
async def test_a_round_that_waited_for_a_service_does_not_delay_the_next(town: World, fails: bool) -> None:
    """Temporal is away for half a second, a hundred times which would be the pause by the share of the time."""
    done: list[bool] = []

    async def works() -> None:
        late = len(done) == 2
        await asyncio.sleep(0.5 if late else 0.0)
        done.append(late)
        if late and fails:
            raise RuntimeError("Temporal is away")

    loop = asyncio.create_task(lead(town.engine, 8, "a test", works, 0.01, 0.01))
    await until(lambda: len(done) >= 4, "rounds after the late one")
    loop.cancel()
    await asyncio.wait([loop])


async def test_rounds_that_are_always_long_keep_their_share(town: World) -> None:
    """The second of two long rounds is followed by a pause of its length over the share."""
    began_s: list[float] = []

    async def works() -> None:
        began_s.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0.05)

    loop = asyncio.create_task(lead(town.engine, 9, "a test", works, 0.01, 0.1))
    await until(lambda: len(began_s) >= 3, "three rounds")
    loop.cancel()
    await asyncio.wait([loop])
    assert began_s[2] - began_s[1] >= 0.5


def _end_holders_of_locks(town: World) -> None:
    with town.session() as session:
        session.execute(
            text(
                "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory'"
                " and database = (select oid from pg_database where datname = current_database())"
            )
        )
