"""Configuration: one model for each section, and `Settings`, which contains all sections."""

from infra.config.data import (
    CopySettings,
    CorrelatedSettings,
    NightlySettings,
    ReplicaSettings,
    TetrisSettings,
    WeightSettings,
)
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
from infra.config.services import ApiSettings, LimitSettings, LivenessSettings, LogSettings, TemporalSettings
from infra.config.settings import Settings, load_settings

__all__ = [
    "ApiSettings",
    "BucketSettings",
    "CapacitySettings",
    "CopySettings",
    "CorrelatedSettings",
    "LifecycleSettings",
    "LimitSettings",
    "LivenessSettings",
    "LogSettings",
    "NightlySettings",
    "ReclaimSettings",
    "ReconcileSettings",
    "ReplicaSettings",
    "SchedulerSettings",
    "ServiceSettings",
    "Settings",
    "TaskSettings",
    "TemporalSettings",
    "TetrisSettings",
    "WeightSettings",
    "load_settings",
]
