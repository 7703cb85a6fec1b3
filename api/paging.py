"""Cursor pagination of lists."""

from collections.abc import Callable, Sequence
from typing import Annotated, Generic, TypeVar

from fastapi import Query
from pydantic import Field

from api.views import View

Item = TypeVar("Item")
Row = TypeVar("Row")
MAX_ITEMS = 500
Limit = Annotated[int, Query(ge=1, le=MAX_ITEMS, description="Maximum number of items in the page")]
Cursor = Annotated[str | None, Query(max_length=300, description="`next_cursor` of the previous page")]
NumberCursor = Annotated[str | None, Query(pattern=r"^[0-9]{1,9}$", description="`next_cursor` of the previous page")]


class Page(View, Generic[Item]):
    """A page of a list. A list's own class gives it its name in the OpenAPI document."""

    items: list[Item]
    next_cursor: str | None = Field(description="The `cursor` of the next page; null on the last one")


def page(rows: Sequence[Row], limit: int, cursor_of: Callable[[Row], str]) -> tuple[Sequence[Row], str | None]:
    """Returns the page and its `next_cursor`. `rows` contains one row more than `limit` if there is a next page."""
    return rows[:limit], cursor_of(rows[limit - 1]) if len(rows) > limit else None
