"""All settings of an installation, read from a YAML file, then the environment, then flags; later sources override.

The environment can set `MIZZEN_DATABASE`, `MIZZEN_DATA_DIR`, `MIZZEN_TEMPORAL`, `MIZZEN_TEMPORAL_NAMESPACE` and
`MIZZEN_TEMPORAL_API_KEY`. The file can contain every setting.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from infra.config.data import CopySettings, TetrisSettings
from infra.config.notify import NotifySettings
from infra.config.scheduling import (
    BucketSettings,
    CapacitySettings,
    LifecycleSettings,
    ReclaimSettings,
    ReconcileSettings,
    SchedulerSettings,
    ServiceSettings,
    TaskSettings,
)
from infra.config.section import Section
from infra.config.services import ApiSettings, LimitSettings, LivenessSettings, LogSettings, TemporalSettings
from infra.documents import problems
from infra.errors import ConfigurationError
from infra.files import read_mapping


class Settings(Section):
    """All settings of an installation."""

    data_dir: Path = Path("mizzen-data")
    database: str | None = None
    """URL of an existing Postgres. None uses the embedded Postgres."""
    temporal: TemporalSettings = TemporalSettings()
    api: ApiSettings = ApiSettings()
    limits: LimitSettings = LimitSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    buckets: BucketSettings = BucketSettings()
    lifecycle: LifecycleSettings = LifecycleSettings()
    reconcile: ReconcileSettings = ReconcileSettings()
    copies: CopySettings = CopySettings()
    capacity: CapacitySettings = CapacitySettings()
    services: ServiceSettings = ServiceSettings()
    reclaim: ReclaimSettings = ReclaimSettings()
    providers: dict[str, dict[str, Any]] = {}
    """Providers of machines, by a name that the operator chooses. Each has a `kind` and the settings of that kind
    (docs/providers.md)."""
    tasks: TaskSettings = TaskSettings()
    notify: NotifySettings = NotifySettings()
    trust_tenants: bool = False
    """Whether `mizzen up` may have several tenants where it cannot separate their tasks from each other."""
    tetris: TetrisSettings = TetrisSettings()
    liveness: LivenessSettings = LivenessSettings()
    logs: LogSettings = LogSettings()
    fleet: Path | None = None
    """YAML file with the regions, clusters and machines of the embedded stack. None uses a small default fleet."""
    master_key: Path | None = None
    """File with the key that encrypts secrets. None uses `master.key` in the data folder."""

    @property
    def master_key_path(self) -> Path:
        """Path of the installation's master key."""
        return self.master_key or self.data_dir / "master.key"


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping):
            found = out.get(key)
            out[key] = _merge(found if isinstance(found, dict) else {}, value)
        elif value is not None:
            out[key] = value
    return out


def load_settings(file: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Reads settings from `file`, then the environment, then `overrides`. Later sources override earlier ones.

    `overrides` are nested mappings in which None means not set.

    Raises:
        ConfigurationError: the file cannot be read, or values are invalid. The message lists all problems.
    """
    body: dict[str, Any] = {}
    if file is not None:
        body = read_mapping(file, "configuration file")
    environment = {
        "database": os.environ.get("MIZZEN_DATABASE"),
        "data_dir": os.environ.get("MIZZEN_DATA_DIR"),
        "temporal": {
            "address": os.environ.get("MIZZEN_TEMPORAL"),
            "namespace": os.environ.get("MIZZEN_TEMPORAL_NAMESPACE"),
            "api_key": os.environ.get("MIZZEN_TEMPORAL_API_KEY"),
        },
    }
    body = _merge(_merge(body, environment), overrides or {})
    try:
        return Settings.model_validate(body)
    except ValidationError as error:
        raise ConfigurationError(f"configuration:\n{problems(Settings, error)}") from None
