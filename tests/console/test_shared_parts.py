"""Many browsers that ask at the same time for the same part."""

import asyncio
from contextlib import AsyncExitStack
from datetime import timedelta

from sqlalchemy import event, func

from console.shared_parts import PartAnswer, Rounds
from domain.phases import Phase
from tests.api.world import ApiWorld
from tests.console.conftest import Browse


async def test_an_answer_begins_after_its_request() -> None:
    """Of many requests at once the first is answered alone, the others together; an error reaches all of its round."""
    rounds, began = Rounds(), 0

    async def compute() -> PartAnswer:
        nonlocal began
        began += 1
        number = began
        await asyncio.sleep(0.01)
        if number == 3:
            raise ValueError(number)
        return PartAnswer(status=number)

    first = await asyncio.gather(*(rounds.answer(("a",), compute) for _ in range(10)))
    assert [answer.status for answer in first] == [1] + [2] * 9
    failed = await asyncio.gather(rounds.answer(("a",), compute), return_exceptions=True)
    assert isinstance(failed[0], ValueError)
    assert (await rounds.answer(("a",), compute)).status == 4


async def test_pages_of_others_are_not_shared(world: ApiWorld, browse: Browse) -> None:
    """Twenty pages cost fewer than ten reads of the queue; another tenant and another filter have their own answers."""
    long_ago = func.now() - timedelta(days=30, minutes=30)  # Pages show its wait in hours: it does not tick.
    world.add_workload(Phase.PENDING, name="mine", submitted_at=long_ago)
    world.add_workload(Phase.PENDING, name="theirs", tenant="speech")
    reads = 0

    def count(*given: object) -> None:
        nonlocal reads
        reads += "FROM workload JOIN tenant" in str(given[2])

    headers = {"HX-Request": "true"}
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(browse("vision")) for _ in range(4)]
        other = await stack.enter_async_context(browse("speech"))
        engine = world.app.state.mizzen.engine
        event.listen(engine, "before_cursor_execute", count)
        alone = await clients[0].get("/console/queue", headers=headers)
        once, reads = reads, 0
        mine, theirs = await asyncio.gather(
            asyncio.gather(*(client.get("/console/queue", headers=headers) for client in clients * 5)),
            other.get("/console/queue", headers=headers),
        )
        event.remove(engine, "before_cursor_execute", count)
        assert reads <= 10 * once
        assert {answer.text for answer in mine} == {alone.text}
        assert "mine" in alone.text
        assert "mine" not in theirs.text
        headers["If-None-Match"] = alone.headers["etag"]
        same = await clients[1].get("/console/queue", headers=headers)
        assert (same.status_code, same.content) == (304, b"")
