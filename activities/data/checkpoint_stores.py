"""The stores of clusters (`Cluster.store_url`), in which the workloads that run there save their checkpoints.

Before a workload uses such a store, a marker object is written beside its checkpoints. A store without the marker is
not the one that has them: it was emptied or replaced, or its folder is not mounted. Without this check, the workload
would continue from an older checkpoint, or from the beginning. Workers and agents may run on different hosts, and
tasks may have other credentials, so agents check the marker too (`agent.isolation.check_store`, `agent.stores`).
"""

from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sqlalchemy import exists, select, tuple_
from sqlalchemy.orm import Session

from activities.lifecycle.staging import store_named
from domain import ids
from infra.db.models import Attempt, Cluster, Machine
from mizzen.objects.urls import open_store

_MARKER = b"mizzen reads this object to see that this store has the checkpoints of the workload\n"


def store_of(session: Session, machines: Iterable[Machine]) -> str | None:
    """Returns the URL of the store that the clusters of all machines share; None: they have none, or several."""
    names = {(machine.region, machine.cluster) for machine in machines}
    found = session.scalars(select(Cluster.store_url).where(tuple_(Cluster.region, Cluster.name).in_(names)).distinct())
    urls = found.all()
    return urls[0] if len(urls) == 1 else None


def was_used(session: Session, url: str, workload: str, attempt: int) -> bool:
    """Returns whether an earlier attempt of the workload has started with this store, so that the marker is there."""
    earlier = (Attempt.workload == workload, Attempt.attempt < attempt)
    return bool(
        session.scalar(select(exists().where(*earlier, Attempt.store_url == url, Attempt.started_at.is_not(None))))
    )


def open_new(url: str, workload: str) -> None:
    """Writes the marker of a workload that no attempt has started in this store yet.

    Never creates the folder of a `file://` store: without the folder, its file system is not mounted on this host.

    Raises:
        ApplicationError: the store cannot be written, or its folder does not exist. The message names it.
    """
    with store_named(f"the store {url}"):
        parts = urlsplit(url)
        if parts.scheme == "file" and not (folder := Path(unquote(parts.path))).is_dir():
            raise FileNotFoundError(
                f"there is no folder {folder} on this host: mount or create it on all machines and workers"
            )
        open_store(url).put(ids.checkpoint_marker_key(workload), _MARKER)


def check(url: str, workload: str) -> None:
    """Checks that a store answers and is the one with the workload's checkpoints.

    Raises:
        ApplicationError: the store cannot be read, or the marker is missing. The message names the store.
    """
    key = ids.checkpoint_marker_key(workload)
    with store_named(f"the store {url}"):
        if open_store(url).size(key) is None:
            raise FileNotFoundError(
                f"the marker {key} is missing: the store was emptied or replaced, or its folder is not mounted"
            )
