"""The JSON Schema (2020-12) of the service document, for the OpenAPI description, and an example.

The schema is only documentation. The module `service` validates documents, with better messages. The schema does not
contain SkyPilot's fields that are refused or have no effect (`skypilot`).
"""

from api.documents import replicas, serving
from api.documents.schema import ACCELERATOR, DURATION, NAME, VARIABLE, Schema, map_of, object_of
from api.documents.schema import DOCUMENT as _WORKLOAD_DOCUMENT
from api.documents.service import MAX_MACHINES
from domain.service import LoadBalancing, ReplicaPolicySpec, ServiceSpec
from domain.serving import ProbeSpec, ServingSpec

EXAMPLE: Schema = {
    "version": 1,
    "name": "chat",
    "tenant": "vision",
    "service": {
        "readiness_probe": {"path": "/v1/models", "initial_delay_seconds": 600},
        "replica_policy": {
            "min_replicas": 2,
            "max_replicas": 8,
            "target_qps_per_replica": 4,
            "num_overprovision": 1,
            "dynamic_ondemand_fallback": True,
        },
        "drain_seconds": 60,
    },
    "resources": {
        "accelerators": ["a100:1", "v100:1"],
        "cpus": 4,
        "memory": "32GiB",
        "ports": 8080,
        "use_spot": True,
    },
    "env": {"MODEL": "small"},
    "secrets": {"HF_TOKEN": "hf-token"},
    "run": ["python3", "serve.py", "--port", "8080"],
}
_WORKLOAD = _WORKLOAD_DOCUMENT["properties"]
_JOB = _WORKLOAD["jobs"]["items"]["properties"]
_PROBE, _SERVING, _POLICY = ProbeSpec(), ServingSpec(), ReplicaPolicySpec()


def _whole(least: int, most: int, description: str = "", default: int | None = None) -> Schema:
    schema: Schema = {"type": "integer", "minimum": least, "maximum": most}
    schema |= {} if default is None else {"default": default}
    return schema | ({"description": description} if description else {})


def _seconds(description: str, default: float) -> Schema:
    return DURATION | {"description": f"{description}; {DURATION['description']}", "default": default}


def _amount(description: str) -> Schema:
    return {"anyOf": [{"type": "string"}, {"type": "number", "exclusiveMinimum": 0}], "description": description}


_PORT: Schema = {
    "anyOf": [_whole(1, replicas.HIGHEST_PORT), {"type": "string", "pattern": "^[0-9]{1,5}$"}],
    "description": "The port on which a replica listens. Without it, a replica reads its port from MIZZEN_PORT",
}
_OPTION: dict[str, Schema] = {
    "accelerators": {
        "anyOf": [
            ACCELERATOR,
            {"type": "array", "items": ACCELERATOR},
            map_of({"type": ["integer", "null"]}, replicas.MAX_OPTIONS, description="GPU type to number"),
        ],
        "description": "GPUs of each machine, such as a100:8; several are alternatives in order of preference",
    },
    "cpus": _amount("4, or 4+"),
    "memory": _amount("64GiB; a number, or a string such as 64+, is in GiB"),
    "ports": {"anyOf": [_PORT, {"type": "array", "items": _PORT}], "description": _PORT["description"]},
    "use_spot": {"type": "boolean", "default": False},
    "provider": NAME | {"description": "Name of a provider in the installation's settings"},
    "cloud": {"type": "string", "description": "The same as provider"},
    "region": NAME,
    "zone": NAME,
    "infra": {"type": "string", "description": "provider/region/zone, with * for any"},
}
_ALTERNATIVES: Schema = {
    "type": "array",
    "items": object_of(_OPTION),
    "minItems": 1,
    "maxItems": replicas.MAX_OPTIONS,
    "description": "Alternatives in order of preference; each replaces some of the values beside this list",
}
_READINESS = object_of(
    {
        "path": {"type": "string", "pattern": "^/"},
        "post_data": {"type": ["object", "array", "string"], "description": "JSON; the probe is a POST with this body"},
        "headers": map_of({"type": ["string", "integer"]}, serving.MAX_HEADERS, description="Headers of the request"),
        "initial_delay_seconds": _seconds("Time within which a replica must become ready", _PROBE.initial_delay_s),
        "timeout_seconds": _seconds("Timeout of one probe", _PROBE.timeout_s),
        "interval_seconds": _seconds("Time between two probes", _PROBE.interval_s),
        "endpoint_probe_interval_seconds": DURATION | {"description": "The same as interval_seconds"},
        "failures": _whole(1, 1000, "Failed probes in a row until a replica is not ready", _PROBE.failures),
    },
    required=("path",),
)
_COUNT = serving.MAX_REPLICAS
_REPLICA_POLICY = object_of(
    {
        "min_replicas": _whole(0, _COUNT, default=_POLICY.min_replicas),
        "max_replicas": _whole(1, _COUNT, "Default: min_replicas, or 10 with target_qps_per_replica"),
        "target_qps_per_replica": {"type": "number", "exclusiveMinimum": 0},
        "upscale_delay_seconds": _seconds("Time for which the load must need more replicas", _POLICY.upscale_delay_s),
        "downscale_delay_seconds": _seconds(
            "Time for which the load must need fewer replicas", _POLICY.downscale_delay_s
        ),
        "spot_placer": {"enum": list(serving.PLACERS), "default": serving.DEFAULT_PLACER},
        "num_overprovision": _whole(0, _COUNT, "Spot replicas beyond the target", _POLICY.num_overprovision),
        "dynamic_ondemand_fallback": {"type": "boolean", "default": _POLICY.dynamic_ondemand_fallback},
        "base_ondemand_fallback_replicas": _whole(
            0, _COUNT, "On-demand replicas that are always kept", _POLICY.base_ondemand_fallback_replicas
        ),
    }
)
_DEFAULTS = {name: one.default for name, one in ServiceSpec.model_fields.items()}
DOCUMENT: Schema = object_of(
    {
        **{key: _WORKLOAD[key] for key in ("version", "name", "tenant", "labels", "priority", "files", "workdir")},
        **{key: _JOB[key] for key in ("setup", "run", "env", "secrets")},
        "envs": map_of(
            {"type": ["string", "number", "boolean"]}, 256, VARIABLE, "The same as env; numbers become strings"
        ),
        "machines": _whole(1, MAX_MACHINES, "Machines of one replica, all in one zone", _DEFAULTS["machines"]),
        "num_nodes": _whole(1, MAX_MACHINES, "The same as machines"),
        "resources": object_of(
            {**_OPTION, "any_of": _ALTERNATIVES, "ordered": _ALTERNATIVES, "setup": _JOB["setup"], "run": _JOB["run"]},
            description="Resources of each machine of a replica",
        ),
        "service": object_of(
            {
                "readiness_probe": {"anyOf": [{"type": "string", "pattern": "^/"}, _READINESS], "default": "/"},
                "replicas": _whole(1, _COUNT, "A fixed number of replicas"),
                "replica_policy": _REPLICA_POLICY,
                "load_balancing_policy": {
                    "enum": [one.value for one in LoadBalancing],
                    "default": _DEFAULTS["balancing"].value,
                },
                "load_balancer": object_of({"stream_timeout_seconds": DURATION}),
                "ports": _PORT,
                "drain_seconds": _seconds("Time for requests in progress of a replica that ends", _SERVING.drain_s),
                "request_timeout_seconds": _seconds(
                    "Longest time without a byte from the replica", _DEFAULTS["request_timeout_s"]
                ),
                "max_queue": _whole(0, serving.MAX_QUEUE, "Requests that wait in the balancer", _DEFAULTS["max_queue"]),
                "max_surge": _whole(1, _COUNT, "Replicas that a rolling update adds at a time", _DEFAULTS["max_surge"]),
                "retry_non_idempotent": {"type": "boolean", "default": _DEFAULTS["retry_non_idempotent"]},
            }
        ),
    },
    required=("service",),
    description="A service: replicas of a server behind one endpoint. A SkyPilot service file is one too",
)
