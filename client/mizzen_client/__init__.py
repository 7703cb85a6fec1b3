"""The API client (`pip install mizzen-client`): submit workloads, watch them, and operate the fleet from Python.

    from mizzen_client import Client

    with Client.from_environment() as mizzen:  # MIZZEN_API and MIZZEN_API_KEY, or a saved context
        workload = mizzen.submit({"version": 1, "name": "digits", ...}, workdir="train/")
        [done] = mizzen.wait([workload["id"]])
        print(done["phase"])

Names are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mizzen_client.archives import PackedFolder, pack
    from mizzen_client.client import Client
    from mizzen_client.contexts import Context, active_context
    from mizzen_client.documents import Document, read_documents
    from mizzen_client.errors import (
        AmbiguousReference,
        ApiError,
        ArchiveError,
        ClientError,
        Conflict,
        DocumentError,
        FieldError,
        Invalid,
        NotAllowed,
        NotConfigured,
        NotFound,
        OutputError,
        Unavailable,
        UnknownReference,
        Unreachable,
    )
    from mizzen_client.functions.executor import Executor
    from mizzen_client.references import resolve

__all__ = [
    "AmbiguousReference",
    "ApiError",
    "ArchiveError",
    "Client",
    "ClientError",
    "Conflict",
    "Context",
    "Document",
    "DocumentError",
    "Executor",
    "FieldError",
    "Invalid",
    "NotAllowed",
    "NotConfigured",
    "NotFound",
    "OutputError",
    "PackedFolder",
    "Unavailable",
    "UnknownReference",
    "Unreachable",
    "active_context",
    "pack",
    "read_documents",
    "resolve",
]

_HOMES = {
    "PackedFolder": "archives",
    "Client": "client",
    "Context": "contexts",
    "Document": "documents",
    "Executor": "functions.executor",
    "active_context": "contexts",
    "pack": "archives",
    "read_documents": "documents",
    "resolve": "references",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'mizzen_client' has no attribute {name!r}")
    return getattr(import_module(f"mizzen_client.{_HOMES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return __all__
