"""`mizzen convert` of SkyPilot's and Kubernetes' files: each field of their manuals."""

import re
from typing import Any

import pytest
import yaml

from api.documents.skypilot import IGNORED, REFUSED
from mizzen_client.convert import convert, skypilot_fields
from mizzen_client.convert.conversion import Carryover
from tests.cli.conversions import problems, refusal


def test_fields_of_services_are_those_of_the_api() -> None:
    """The converter refuses and ignores the fields that the API does; it leaves out `config` as a whole."""
    assert "config" in skypilot_fields.SERVICE_IGNORED[""]
    for section, fields in REFUSED.items():
        if section == "config":
            continue
        own = skypilot_fields.SERVICE_REFUSED[section]
        assert fields.keys() - own.keys() <= {"jobs", "level"}, section
    for section, fields in IGNORED.items():
        assert section == "config" or fields.keys() == skypilot_fields.SERVICE_IGNORED[section].keys() - {"config"}


TASK = "run: 'true'\nresources: {{cpus: 1, memory: 1, use_spot: false{}}}\n{}"
SKYPILOT_FIELDS = """
name=x workdir=. num_nodes=1 envs={A:1} secrets={B:x} volumes={/a:b} file_mounts={/a:s3://b} setup=true config={a:1}
experimental={a:1} inputs={a:1} outputs={a:1} event_callback=x pool=x
api_server_access=true volume_mounts=[] priority=1
"""
SKYPILOT_RESOURCES = """
infra=aws cloud=aws region=x zone=y accelerators=A100:1 accelerator_args={a:1} instance_type=x disk_size=10
disk_tier=low network_tier=best ports=80 image_id=docker:x labels={a:b} any_of=[{use_spot:true}]
ordered=[{use_spot:true}] autostop=5 job_recovery=FAILOVER max_hourly_cost=1 volumes=[] ephemeral_storage=1
local_disk=x priority_class=x hooks=[] _cluster_config_overrides={a:1}
"""


@pytest.mark.parametrize(
    "field", [*SKYPILOT_FIELDS.split(), *(f"resources.{one}" for one in SKYPILOT_RESOURCES.split())]
)
def test_each_field_of_skypilots_manual_is_accounted_for(field: str) -> None:
    path, _, value = field.partition("=")
    value = value.replace(":", ": ").replace("s3: ", "s3:").replace("docker: ", "docker:").replace("A100: ", "A100:")
    name = path.removeprefix("resources.")
    text = TASK.format(f", {name}: {value}", "") if "." in path else TASK.format("", f"{name}: {value}\n")
    found = convert(text.encode(), "task.yaml", "skypilot")
    assert any(one.source.startswith(path) for one in found.remarks), [str(one) for one in found.remarks]
    assert not any("does not know" in one.why for one in found.remarks)
    assert [problem for document in found.documents for problem in problems(document)] == []


POD_FIELDS = """
activeDeadlineSeconds affinity automountServiceAccountToken dnsConfig dnsPolicy enableServiceLinks
ephemeralContainers hostAliases hostIPC hostNetwork hostPID hostUsers hostname hostnameOverride initContainers
nodeName os overhead preemptionPolicy priority priorityClassName readinessGates resourceClaims resources
restartPolicy runtimeClassName schedulerName schedulingGates securityContext serviceAccount serviceAccountName
setHostnameAsFQDN shareProcessNamespace subdomain terminationGracePeriodSeconds tolerations
topologySpreadConstraints imagePullSecrets nodeSelector volumes
"""
CONTAINER_FIELDS = """
args command env envFrom image imagePullPolicy lifecycle livenessProbe name ports readinessProbe resizePolicy
resources restartPolicy restartPolicyRules securityContext startupProbe stdin stdinOnce terminationMessagePath
terminationMessagePolicy tty volumeDevices volumeMounts workingDir
"""
JOB_FIELDS = """
activeDeadlineSeconds backoffLimit backoffLimitPerIndex completionMode completions managedBy manualSelector
maxFailedIndexes parallelism podFailurePolicy podReplacementPolicy selector successPolicy suspend template
ttlSecondsAfterFinished
"""
VALUES: dict[str, Any] = {
    "activeDeadlineSeconds": 60, "terminationGracePeriodSeconds": 9, "restartPolicy": "Never", "subdomain": "x",
    "imagePullSecrets": [{"name": "a"}], "nodeSelector": {"a": "b"}, "volumes": [{"name": "a", "emptyDir": {}}],
    "args": ["x"], "command": ["x"], "env": [{"name": "A", "value": "b"}], "envFrom": [{"secretRef": {"name": "a"}}],
    "image": "x", "workingDir": "/x", "name": "main", "volumeMounts": [{"name": "a", "mountPath": "/a"}],
    "backoffLimit": 1, "backoffLimitPerIndex": 1, "completionMode": "Indexed", "completions": 2, "parallelism": 2,
    "podFailurePolicy": {"rules": [{"action": "Ignore", "onPodConditions": []}]}, "suspend": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("part", "field"),
    [("pod", one) for one in POD_FIELDS.split()]
    + [("container", one) for one in CONTAINER_FIELDS.split()]
    + [("job", one) for one in JOB_FIELDS.split() if one != "template"],
)
def test_each_field_of_kubernetes_is_accounted_for(part: str, field: str) -> None:
    container: dict[str, Any] = {"name": "main", "image": "x", "command": ["true"]}
    pod: dict[str, Any] = {"containers": [container]}
    job: dict[str, Any] = {"template": {"spec": pod}}
    value = VALUES.get(field, {"limits": {"cpu": 1}} if (part, field) == ("container", "resources") else {"a": 1})
    {"pod": pod, "container": container, "job": job}[part][field] = value
    if field == "volumeMounts":
        pod["volumes"] = VALUES["volumes"]
    body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job}
    found = convert(yaml.safe_dump(body).encode(), "job.yaml")
    assert not any("does not know" in one.why for one in found.remarks)
    singular = field.removesuffix("s")
    assert any(re.search(rf"\b{field}\b|\b{singular}:", one.source) for one in found.remarks), field
    assert [problem for document in found.documents for problem in problems(document)] == []


@pytest.mark.parametrize(
    ("text", "line", "right"),
    [
        ("apiVersion: batch/v2\nkind: Job\nmetadata: {name: x}\n", 1, "must be batch/v1"),
        ("apiVersion: v1\nkind: Pod\nmetadata: {name: x}\n", 1, "neither a Job nor a JobSet"),
        ("apiVersion: batch/v1\nkind: Job\nspec: {}\n", 1, "metadata.name is missing"),
        ("apiVersion: batch/v1\nkind: Job\nmetadata: {name: x}\nspec:\n  template: {spec: {}}\n", 5, "no containers"),
        ("apiVersion: batch/v1\nkind: Job\nmetadata: {name: x}\nspec:\n  parallelism: 0\n", 5, "from 1 to"),
        ("apiVersion: batch/v1\nkind: Job\nmetadata: {name: x}\nspec:\n  parallelism: many\n", 5, "a whole number"),
        ("apiVersion: batch/v1\nkind: Job\nmetadata: [x]\n", 3, "must be a mapping"),
        ("name: x\nresources: {accelerators: A100:eight}\nrun: x\n", 2, "such as A100:8"),
        ("name: x\nresources: {cpus: 4x}\nrun: x\n", 2, "a number such as 8"),
        ("name: x\nresources: {accelerators: [A100:8, L4:1]}\nrun: x\n", 2, "the same number for all"),
        ("name: x\nresources:\n  cpus: 4\n", 1, "a document needs a command"),
        ("name: x\nresources:\n  image_id: docker:Up/Case\nrun: x\n", 3, "in lower case"),
        ("name: x\nresources:\n  labels: {'a b': c}\nrun: x\n", 3, "letters and digits"),
        ("name: x\nresources: {cpus: 20000}\nrun: x\n", 2, "at most 10000"),
        ("name: x\nresources: {cpus: 1e999}\nrun: x\n", 2, "too large a number"),
        ('name: x\nrun: "a\\0b"\n', 2, "NUL"),
        ("name: x\nrun: [a]\n", 2, "must be a single value"),
        ("name: x\nnum_nodes: 0\nrun: x\n", 2, "at least 1"),
        ("name: x\nrun: |\n  a\n\tb\n", 4, "\\t"),
        ("name: x\nname: y\nrun: x\n", 2, "duplicate key"),
        ("run: !!python/name:os.system x\n", 1, "could not determine a constructor"),
    ],
)
def test_wrong_manifests_are_refused(text: str, line: int, right: str) -> None:
    message = refusal(text)
    assert message.startswith(f"{line}: refused: ") and right in message


def test_limits_of_the_jobs_of_a_jobset_are_those_of_the_gang() -> None:
    pod = {"spec": {"containers": [{"name": "main", "image": "x", "command": ["true"]}]}}
    limits = {"backoffLimit": 1, "backoffLimitPerIndex": 2, "podFailurePolicy": {"rules": []}}
    job = {"name": "w", "template": {"spec": {"completionMode": "Indexed", **limits, "template": pod}}}
    body = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "x"}}
    found = convert(yaml.safe_dump(body | {"spec": {"replicatedJobs": [job]}}).encode(), "jobset.yaml")
    told = {one.source.rpartition(".")[2].partition(":")[0]: one for one in found.remarks}
    assert {told[name].outcome for name in limits} == {Carryover.CHANGED}
