"""Permissions of data folders, and the refusal of several tenants that share a user."""

import os
import stat
from pathlib import Path

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from domain.isolation import Isolation, TaskNetwork
from infra.config.scheduling import TaskSettings
from infra.config.settings import Settings
from infra.db.session import transaction
from infra.db.tenants import Tenant
from infra.errors import ConfigurationError, StackError
from infra.stack.embedded import EmbeddedStack, _until_done
from infra.stack.fleet import DEFAULT_FLEET, Fleet
from infra.stack.lock import data_folder
from server.agents import fleet_isolation, run_fleet


def test_a_new_data_folder_is_closed_and_one_that_exists_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that mizzen makes is closed, and git ignores it. One of others keeps its mode, with a warning."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    old.chmod(0o1777)
    for _ in range(2):
        with data_folder(old), data_folder(new):
            pass
    modes = {old: 0o1777, new: 0o711 if os.geteuid() == 0 else 0o700}
    assert {path: stat.S_IMODE(path.stat().st_mode) for path in modes} == modes
    assert (new / ".gitignore").read_text() == "*\n" and not (old / ".gitignore").exists()
    assert len(caplog.messages) == 2 and f"{old}: mode 1777 lets other users list or change it" in caplog.text


def test_several_tenants_that_share_a_user_are_refused(tmp_path: Path, database: Engine) -> None:
    """A start with more than one tenant whose tasks run as the same user fails, unless the tenants trust each other."""
    url = database.url.render_as_string(hide_password=False)
    settings = Settings(database=url, data_dir=tmp_path, tasks=TaskSettings(isolation=Isolation.NONE))

    def stack(fleet: Fleet = DEFAULT_FLEET, **more: bool) -> EmbeddedStack:
        why = fleet_isolation(settings, fleet, tmp_path).why_shared
        return EmbeddedStack(settings.model_copy(update=more), fleet, tmp_path, print, why_shared=why)

    (tmp_path / "run").mkdir()
    for name in ("one", "other"):
        stack()._bootstrap(database)
        with transaction(database) as session:
            session.add(Tenant(name=name, level=3))
    with pytest.raises(ConfigurationError, match=r"2 tenants exist.* run as user .* --trust-tenants"):
        stack()._bootstrap(database)
    stack(trust_tenants=True)._bootstrap(database)
    (region,) = DEFAULT_FLEET.regions
    (cluster,) = region.clusters
    (entry,) = cluster.machines
    own = cluster.model_copy(update={"machines": (entry.model_copy(update={"run_as": "nobody"}),)})
    stack(Fleet(regions=(region.model_copy(update={"clusters": (own,)}),)))._bootstrap(database)


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


def test_agents_do_not_start_with_less_separation_than_was_promised(tmp_path: Path) -> None:
    """`mizzen up` has allowed several tenants, and its agents find that they can no longer separate their tasks."""
    (tmp_path / "fleet.yaml").write_text(DEFAULT_FLEET.model_dump_json(exclude_none=True))
    settings = Settings(data_dir=tmp_path, tasks=TaskSettings(isolation=Isolation.NONE))
    with pytest.raises(ConfigurationError, match=r"tenants are no longer separated: .* isolation is none"):
        run_fleet(settings, tmp_path / "fleet.yaml", separate=True)


def test_a_network_of_their_own_is_refused_where_tasks_cannot_have_it(tmp_path: Path) -> None:
    """At the start, with what is missing. Containers would have the network of the machine."""
    tasks = TaskSettings(isolation=Isolation.NONE, network=TaskNetwork.PORTS, container_engine="none")
    with pytest.raises(
        ConfigurationError, match=r"tasks.network ports: not possible on this machine: isolation is none"
    ):
        fleet_isolation(Settings(data_dir=tmp_path, tasks=tasks), DEFAULT_FLEET, tmp_path)
    tasks = TaskSettings(network=TaskNetwork.PORTS, container_engine="/run/docker.sock")
    with pytest.raises(ConfigurationError, match=r"set tasks.container_engine to none, not /run/docker.sock"):
        fleet_isolation(Settings(data_dir=tmp_path, tasks=tasks), DEFAULT_FLEET, tmp_path)
