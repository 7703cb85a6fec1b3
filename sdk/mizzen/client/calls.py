"""The base class of the client's parts: it sends requests to the API and reads paged lists."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from mizzen.client.transport import Transport

PAGE = 500


class Calls:
    """Base class of the parts of the client. It sends requests through `_transport`."""

    _transport: Transport

    def _call(self, method: str, *parts: str, **options: Any) -> Any:
        return self._transport.request(method, path_of(*parts), **options)

    def _pages(self, path: str | tuple[str, ...], params: dict[str, Any], limit: int | None) -> Iterator[Any]:
        parts = path.split("/") if isinstance(path, str) else path
        left = limit
        cursor = None
        while left is None or left > 0:
            size = PAGE if left is None else min(PAGE, left)
            page = self._call("GET", *parts, params={**params, "limit": size, "cursor": cursor})
            items = page["items"] if left is None else page["items"][:left]
            yield from items
            left = None if left is None else left - len(items)
            cursor = page.get("next_cursor")
            if cursor is None:
                return


def path_of(*parts: str) -> str:
    """Return the URL path of a resource. Each part is quoted, so it may contain any character."""
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)
