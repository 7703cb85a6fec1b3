"""The published JSON Schemas (2020-12) of the workload and the service document, each with an example."""

from api.documents.forms import Schema
from api.documents.service import SERVICE
from api.documents.workload import WORKLOAD

DOCUMENT = WORKLOAD.schema
EXAMPLE: Schema = {
    "version": 1,
    "name": "digits",
    "tenant": "vision",
    "labels": {"team": "demo"},
    "tables": ["digits"],
    "checkpoint": {"interval": "5s", "grace": "10s", "keep": 2},
    "limits": {"max_runtime": "1h", "max_silence": "2m", "retries": 1},
    "jobs": [
        {
            "name": "trainer",
            "role": "trainer",
            "tasks": 2,
            "resources": {"accelerators": ["a100:1", "v100:1"], "cpus": 1, "memory": "512MiB"},
            "run": ["python3", "train.py"],
            "env": {"EPOCHS": "10"},
            "secrets": {"HF_TOKEN": "hf-token"},
        }
    ],
}
SERVICE_DOCUMENT = SERVICE.schema
SERVICE_EXAMPLE: Schema = {
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
