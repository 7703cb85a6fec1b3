"""What other users may do in a data folder, and what an operator is told where tenants share a user."""

import os
import stat
from pathlib import Path

import pytest
from sqlalchemy import Engine

from infra.config import Settings, TaskSettings
from infra.db.models import Tenant
from infra.db.session import transaction
from infra.stack.embedded import EmbeddedStack
from infra.stack.fleet import DEFAULT_FLEET, Fleet
from infra.stack.lock import data_folder
from server.up import _warn_of_sharing


def test_a_data_folder_is_closed_also_one_that_was_open(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody else can list it or read what is in it; what was changed is said, once."""
    old, new = tmp_path / "old", tmp_path / "new"
    for path in (old, old / "run", old / "machines"):
        path.mkdir(mode=0o755)
    (old / "temporal.db").write_text("histories")
    for _ in range(2):
        with data_folder(old), data_folder(new):
            pass
    own = 0o711 if os.geteuid() == 0 else 0o700
    modes = {old: own, old / "machines": own, old / "run": 0o700, old / "temporal.db": 0o600, new: own}
    assert {path: stat.S_IMODE(path.stat().st_mode) for path in modes} == modes
    assert len(caplog.messages) == 4 and f"{old}: mode 755 was too open" in caplog.text


def test_several_tenants_that_share_a_user_are_warned_of(
    tmp_path: Path, database: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    """At each start with more than one tenant it is said as whom their tasks run, why, and what to do."""
    url = database.url.render_as_string(hide_password=False)
    settings = Settings(database=url, data_dir=tmp_path, tasks=TaskSettings(separate_tenants=False))

    def said(fleet: Fleet = DEFAULT_FLEET) -> str:
        _warn_of_sharing(EmbeddedStack(settings, fleet, tmp_path, print))
        return capsys.readouterr().err

    with transaction(database) as session:
        session.add(Tenant(name="one", level=3))
    assert said() == ""
    with transaction(database) as session:
        session.add(Tenant(name="other", level=3))
    for _ in range(2):
        assert said().startswith("WARNING: 2 tenants: tasks of all tenants run as ")
    (region,) = DEFAULT_FLEET.regions
    (cluster,) = region.clusters
    (entry,) = cluster.machines
    own = cluster.model_copy(update={"machines": (entry.model_copy(update={"run_as": "nobody"}),)})
    assert said(Fleet(regions=(region.model_copy(update={"clusters": (own,)}),))) == ""
