"""Initialises an installation: the database schema, the regions, the master key and the first operator's API key."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.dialects.postgresql import insert

from infra.db.logs import Audit
from infra.db.migrate import upgrade
from infra.db.models import Cluster, Region
from infra.db.session import transaction
from infra.db.tenants import ApiKey
from infra.files import write_private
from infra.keys import hash_api_key, new_api_key
from infra.master_key import ensure_master_key

OPERATOR_KEY_FILE = "operator.key"


def bootstrap(
    engine: Engine,
    data_dir: Path,
    master_key: Path,
    buckets: Mapping[str, str],
    clusters: Mapping[tuple[str, str], Mapping[str, Any]] = MappingProxyType({}),
    *,
    forget_unreadable_secrets: bool = False,
) -> str:
    """Migrates the database, writes regions and clusters, and returns the operator's API key. Idempotent.

    The API key is created by the first call and stored in `data_dir`; the database stores only its hash.

    Args:
        engine: the database.
        data_dir: the data folder.
        master_key: path of the master key, which is created if it is missing.
        buckets: bucket URL of each region. Missing regions are added; the URLs of existing ones are updated.
        clusters: values of columns of `Cluster`, by region and cluster name. They are inserted or updated.
        forget_unreadable_secrets: whether to delete secrets that the master key does not decrypt.

    Raises:
        ConfigurationError: the master key does not decrypt the database's secrets, and `forget_unreadable_secrets` is
            false.
    """
    upgrade(engine)
    ensure_master_key(engine, master_key, forget_unreadable=forget_unreadable_secrets)
    path = data_dir / OPERATOR_KEY_FILE
    if path.exists():
        key = path.read_text().strip()
        key_id = key.split("_")[1]
    else:
        key_id, key, _ = new_api_key()
        write_private(path, key + "\n")
    with transaction(engine) as session:
        made = session.execute(
            insert(ApiKey)
            .values(id=key_id, sha256=hash_api_key(key), role="operator", tenant=None, label="first operator")
            .on_conflict_do_nothing()
            .returning(ApiKey.id)
        ).first()
        if made is not None:
            session.add(Audit(actor="mizzen", tenant=None, action="key.create", target=key_id, detail={}))
        for name, url in sorted(buckets.items()):
            statement = insert(Region).values(name=name, bucket_url=url)
            session.execute(statement.on_conflict_do_update(index_elements=["name"], set_={"bucket_url": url}))
        for (region, name), settings in sorted(clusters.items()):
            cluster = insert(Cluster).values(region=region, name=name, **settings)
            session.execute(cluster.on_conflict_do_update(index_elements=["region", "name"], set_=dict(settings)))
    return key
