"""Permissions of data folders, and the warning for operators if tenants share a user."""

import os
import socket
import stat
from pathlib import Path

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from infra.config.scheduling import TaskSettings
from infra.config.settings import Settings
from infra.db.session import transaction
from infra.db.tenants import Tenant
from infra.errors import StackError
from infra.stack.embedded import EmbeddedStack, _until_done
from infra.stack.fleet import DEFAULT_FLEET, Fleet
from infra.stack.lock import data_folder
from infra.stack.ports import free_port
from server.up import _warning_of_sharing


def test_a_new_data_folder_is_closed_and_one_that_exists_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Other users cannot list a data folder that mizzen makes. A folder of others keeps its mode, with a warning."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    old.chmod(0o1777)
    for _ in range(2):
        with data_folder(old), data_folder(new):
            pass
    modes = {old: 0o1777, new: 0o711 if os.geteuid() == 0 else 0o700}
    assert {path: stat.S_IMODE(path.stat().st_mode) for path in modes} == modes
    assert len(caplog.messages) == 2 and f"{old}: mode 1777 lets other users list or change it" in caplog.text


async def test_several_tenants_that_share_a_user_are_warned_of(tmp_path: Path, database: Engine) -> None:
    """Each start with more than one tenant warns that their tasks run as the same user."""
    url = database.url.render_as_string(hide_password=False)
    settings = Settings(database=url, data_dir=tmp_path, tasks=TaskSettings(separate_tenants=False))

    async def said(fleet: Fleet = DEFAULT_FLEET) -> str | None:
        return await _warning_of_sharing(EmbeddedStack(settings, fleet, tmp_path, print))

    with transaction(database) as session:
        session.add(Tenant(name="one", level=3))
    assert await said() is None
    with transaction(database) as session:
        session.add(Tenant(name="other", level=3))
    for _ in range(2):
        assert str(await said()).startswith("2 tenants: tasks of all tenants run as ")
    (region,) = DEFAULT_FLEET.regions
    (cluster,) = region.clusters
    (entry,) = cluster.machines
    own = cluster.model_copy(update={"machines": (entry.model_copy(update={"run_as": "nobody"}),)})
    assert await said(Fleet(regions=(region.model_copy(update={"clusters": (own,)}),))) is None


@pytest.mark.parametrize("silent", [False, True], ids=["refuses", "does not answer"])
async def test_a_database_that_is_away_does_not_end_the_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    """If the database refuses connections or hangs, the warning says that the number of tenants is unknown."""
    monkeypatch.setattr("server.up._ANSWERS_S", 0.2 if silent else 60.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"postgresql://mizzen@127.0.0.1:{listener.getsockname()[1] if silent else free_port()}/mizzen"
        settings = Settings(database=url, data_dir=tmp_path, tasks=TaskSettings(separate_tenants=False))
        said = await _warning_of_sharing(EmbeddedStack(settings, DEFAULT_FLEET, tmp_path, print))
    assert str(said).startswith("the number of tenants is unknown, the database does not respond; if there are several")


async def test_a_start_goes_on_where_a_part_was_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Setup is retried after its server was restarted; if the server stays unreachable, the error names it."""
    errors: list[Exception] = [OperationalError("select", {}, Exception("closed")), RuntimeError("refused")]

    async def work() -> int:
        if errors:
            raise errors.pop()
        return 7

    assert await _until_done("postgres", work) == 7
    monkeypatch.setattr("infra.stack.embedded._SETTLES_S", 0.0)
    errors += [RuntimeError("no connection")]
    with pytest.raises(StackError, match="temporal: no connection"):
        await _until_done("temporal", work)
