"""SkyPilot's fields: those of tasks that need no calculation, and those of services, which mizzen reads itself."""

from collections.abc import Mapping

_COSTS = "it is a hint about costs"
_DISK = "the machine's disk is used; operators determine its size"
DROPPED: Mapping[str, str] = {
    "inputs": _COSTS, "outputs": _COSTS,
    "api_server_access": "tasks have no access to the API",
    "event_callback": "follow `mizzen events NAME`",
}  # fmt: skip
"""By field of a task: why the result is the same without it."""
LOST: Mapping[str, str] = {
    "volumes": "mizzen mounts no volumes: use `tables`, `workdir` or a bucket",
    "volume_mounts": "mizzen mounts no volumes: use `tables`, `workdir` or a bucket",
    "managed_secrets": "write `secrets: {VARIABLE: name}`, and store the value with `mizzen tenants secrets`",
    "config": "settings of clouds are in the installation's settings of its providers",
    "experimental": "settings of clouds are in the installation's settings of its providers",
    "pool": "mizzen has no pools of workers: the elements of an `array` follow each other on the machines",
    "priority": "priorities have another scale: give `priority`, a level from 1 (the highest) to 7",
}  # fmt: skip
"""By field of a task: what to do, because the result may differ."""
RESOURCES_DROPPED: Mapping[str, str] = {
    "disk_size": _DISK, "disk_tier": _DISK, "local_disk": _DISK,
    "network_tier": "the machine's network is used; operators determine it",
    "autostop": "the resources are free when the task has ended; there is no cluster to stop",
    "max_hourly_cost": "operators and quotas limit costs",
    "priority": "give `priority` at the top level, a level from 1 (the highest) to 7",
    "priority_class": "give `priority` at the top level, a level from 1 (the highest) to 7",
    "_cluster_config_overrides": "it is a field of SkyPilot's own records",
}  # fmt: skip
RESOURCES_LOST: Mapping[str, str] = {
    "instance_type": "a document names no machine types: give accelerators, cpus and memory",
    "accelerator_args": "TPUs are not supported",
    "ports": "tasks use the machine's network, and no port is opened to the outside: use a service (`mizzen serve up`)",
    "volumes": "mizzen mounts no volumes: use `tables`, `workdir` or a bucket",
    "ephemeral_storage": "a document cannot ask for disk space; operators see to it",
    "hooks": "a task gets SIGTERM before it is stopped: handle it in run",
}  # fmt: skip
SERVICE_FIELDS: Mapping[str, tuple[str, ...]] = {
    "": ("workdir", "num_nodes", "envs", "file_mounts", "setup", "run", "resources", "service"),
    "resources": ("accelerators", "cpus", "memory", "ports", "use_spot", "any_of", "ordered", "cloud", "region", "zone",
                  "infra", "image_id", "labels"),
    "service": ("readiness_probe", "replicas", "replica_policy", "load_balancing_policy", "load_balancer", "ports",
                "tls"),
    "service.readiness_probe": ("path", "post_data", "headers", "initial_delay_seconds", "timeout_seconds",
                                "endpoint_probe_interval_seconds"),
    "service.replica_policy": ("min_replicas", "max_replicas", "target_qps_per_replica", "upscale_delay_seconds",
                               "downscale_delay_seconds", "spot_placer", "num_overprovision",
                               "dynamic_ondemand_fallback", "base_ondemand_fallback_replicas"),
}  # fmt: skip
"""By section of a service: the fields that mizzen reads as SkyPilot does."""
SERVICE_REFUSED: Mapping[str, Mapping[str, str]] = {
    "": {
        **{name: why for name, why in LOST.items() if name != "config"},
        "event_callback": "follow `mizzen events`",
    },
    "resources": {
        **RESOURCES_LOST,
        "local_disk": _DISK,
        "max_hourly_cost": "limit replica_policy.max_replicas, or the tenant's quota",
        "priority": "give `priority` at the top level, a level from 1 (the highest) to 7",
        "priority_class": "give `priority` at the top level, a level from 1 (the highest) to 7",
        "job_recovery": "a lost replica is always replaced",
        "autostop": "a service runs until `mizzen serve down`; min_replicas: 0 ends all replicas of an idle service",
    },
    "service": {
        "pool": "a pool of workers for batch jobs is not a service",
        "workers": "the field is named replicas",
    },
    "service.replica_policy": {"queue_length_threshold": "only SkyPilot's pools have it"},
    "service.readiness_probe": {
        "consecutive_failure_threshold_timeout": "the time until a failing replica is ended is fixed",
    },
}  # fmt: skip
SERVICE_IGNORED: Mapping[str, Mapping[str, str]] = {
    "": {
        **{name: DROPPED[name] for name in ("inputs", "outputs", "api_server_access")},
        "config": "the settings of the installation's providers apply",
    },
    "resources": {name: RESOURCES_DROPPED[name] for name in ("disk_size", "disk_tier", "network_tier")},
}
