"""The client's part about documents with a working directory: it is packed and uploaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mizzen.client.calls import Calls
from mizzen.client.errors import Invalid

if TYPE_CHECKING:
    from mizzen.client.archives import PackedFolder


class Uploads(Calls):
    """Sends documents, and uploads working directories."""

    def upload(self, archive: "PackedFolder", tenant: str | None = None) -> None:
        """Upload a packed working directory. `tenant` is its owner; it is needed if the API key has no tenant."""
        headers = {"content-type": "application/gzip"}
        self._call("PUT", "archives", archive.sha256, params={"tenant": tenant}, content=archive.body, headers=headers)

    def _send(
        self, method: str, parts: tuple[str, ...], document: Mapping[str, Any], workdir: Path | str | None,
        **options: Any,
    ) -> Any:  # fmt: skip
        if workdir is None:
            return self._call(method, *parts, body=document, **options)
        from mizzen.client.archives import pack  # its imports are not needed by most calls

        archive = pack(Path(workdir))
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
