"""The base class of the client's parts: it sends requests and documents to the API, and reads paged lists."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from mizzen_client.errors import ArchiveError, Invalid
from mizzen_client.transport import Transport

if TYPE_CHECKING:
    from mizzen_client.archives import PackedFolder

PAGE = 500
_TRIES = 3
"""How often the client sends parts that the API lacks before it gives up."""
_INSPECTED_S = 300.0
"""How long the API may take to read an archive of parts, once it can begin (`limits.inspect_s`)."""


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

    def upload(self, archive: "PackedFolder", tenant: str | None = None) -> None:
        """Upload a packed working directory, without the parts that the API has from an earlier upload.

        `tenant` is its owner; it is needed if the API key has no tenant.
        """
        options: dict[str, Any] = {"params": {"tenant": tenant}, "headers": {"content-type": "application/gzip"}}
        if len(archive.parts) <= 1:
            self._call("PUT", "archives", archive.sha256, content=archive.body, **options)
            return
        parts = {part.sha256: part for part in archive.parts}
        body = {"parts": [part.sha256 for part in archive.parts]}
        for _ in range(_TRIES):
            answer = self._call(
                "POST", "archives", archive.sha256,
                params={"tenant": tenant}, body=body, idempotent=True, answer_s=_INSPECTED_S,
            )  # fmt: skip
            if not answer["missing"]:
                return
            for sha256 in answer["missing"]:
                part = parts[sha256]
                content = archive.read(part.start, part.size_bytes)
                self._call("PUT", "archives", "parts", sha256, content=content, **options)
        raise ArchiveError(f"workdir: the API has lost parts of the archive {_TRIES} times; submit it again")

    def _send(
        self, method: str, parts: tuple[str, ...], document: Mapping[str, Any],
        workdir: "Path | str | PackedFolder | None", **options: Any,
    ) -> Any:  # fmt: skip
        if workdir is None:
            return self._call(method, *parts, body=document, **options)
        from mizzen_client.archives import PackedFolder, pack  # their imports are not needed by most calls

        archive = workdir if isinstance(workdir, PackedFolder) else pack(Path(workdir))
        body = {**document, "workdir": {"archive": archive.sha256}}
        try:
            return self._call(method, *parts, body=body, **options)
        except Invalid as error:
            # Upload the archive only if the rest of the document is valid. A missing archive is not the user's mistake.
            if {problem.path for problem in error.errors} != {"workdir"}:
                raise error.without("workdir") from None
        tenant = document.get("tenant")
        self.upload(archive, tenant if isinstance(tenant, str) else None)
        return self._call(method, *parts, body=body, **options)


def path_of(*parts: str) -> str:
    """Return the URL path of a resource. Each part is quoted, so it may contain any character."""
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)
