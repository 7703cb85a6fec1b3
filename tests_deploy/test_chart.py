"""The Helm chart: Helm renders it, Kubernetes' schemas accept it, and its pods have least rights, no privileges."""

from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

CHART = Path(__file__).resolve().parent.parent / "deploy" / "helm" / "mizzen"
VALUES: dict[str, Any] = {
    "regions": {"east": "s3://east/mizzen", "west": "gs://west/mizzen"},
    "settings": {"notify": {"allow": ["10.0.0.0/8"]}, "api": {"port": 1, "key_warning_s": 60}},
    "imagePullSecrets": [{"name": "registry"}],
    "envFrom": [{"secretRef": {"name": "s3"}}],
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "mizzen", "operator": "Exists"}],
    "serviceAccount": {"annotations": {"role": "buckets"}},
}
WITH_RIGHTS: dict[str, Any] = {
    **VALUES,
    "podNamespaces": ["pods-a", "pods-b"],
    "dispatcher": {"settings": {"machine_types": {"m": {"cpus": 8}}, "clusters": {"w1": {"machines": {"m": 2}}}}},
}
RIGHTS = CHART.parents[1] / "kubernetes"
VERSIONS = ("1.27", "1.28", "1.33", "1.37")


def _rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    files = helm_python.Chart.load(CHART).render(values)
    return [found for text in files.values() for found in yaml.safe_load_all(text) if found]


def _pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {o["metadata"]["name"]: o["spec"]["template"]["spec"] for o in objects if o["kind"] == "Deployment"}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", [VALUES, WITH_RIGHTS, {"regions": {"east": "s3://east/mizzen"}}])
def test_kubernetes_accepts_what_helm_renders(values: dict[str, Any], version: str) -> None:
    """Each object has the form that this version of Kubernetes wants, without unknown fields."""
    objects = _rendered(values)
    for one in objects:
        kubernetes_validate.validate(one, version, strict=True)
    kinds = {"ConfigMap", "Deployment", "Service", "ServiceAccount"}
    rights = {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"} if "podNamespaces" in values else set()
    assert {o["kind"] for o in objects} == kinds | rights


def test_no_pod_has_rights_or_privileges() -> None:
    """No token of Kubernetes, no root, no capabilities, a read-only root, and no privilege is gained."""
    objects = _rendered(VALUES)
    assert all(o["automountServiceAccountToken"] is False for o in objects if o["kind"] == "ServiceAccount")
    for pod in _pods(objects).values():
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            security = container["securityContext"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["readOnlyRootFilesystem"] is True and security["allowPrivilegeEscalation"] is False
            assert "memory" in container["resources"]["limits"]
        assert not any(pod.get(name) for name in ("hostNetwork", "hostPID", "hostIPC"))
        assert {name for volume in pod["volumes"] for name in volume} == {"name", "emptyDir", "secret", "configMap"}


def _rules(objects: list[dict[str, Any]], kind: str) -> list[list[dict[str, Any]]]:
    return [one["rules"] for one in objects if one["kind"] == kind]


def test_only_control_workers_and_the_dispatcher_have_rights() -> None:
    """Their rights are those of the manifests; only their pods have a token, and the dispatcher has no secrets."""
    objects = _rendered(WITH_RIGHTS)
    for kind, file, count in (("Role", "rbac.yaml", 2), ("ClusterRole", "dispatcher-rbac.yaml", 1)):
        (wanted,) = _rules(list(yaml.safe_load_all((RIGHTS / file).read_text())), kind)
        assert _rules(objects, kind) == [wanted] * count
    bound = {(o["kind"], o["metadata"].get("namespace"), o["subjects"][0]["name"]) for o in objects if "subjects" in o}
    assert bound == {
        ("RoleBinding", "pods-a", "release-name-control"),
        ("RoleBinding", "pods-b", "release-name-control"),
        ("ClusterRoleBinding", None, "release-name-dispatcher"),
    }
    pods = _pods(objects)
    tokens = {name: pod["serviceAccountName"] for name, pod in pods.items() if pod["automountServiceAccountToken"]}
    assert tokens == {name: name for name in ("release-name-control", "release-name-dispatcher")}
    accounts = {o["metadata"]["name"] for o in objects if o["kind"] == "ServiceAccount"}
    assert accounts == {"release-name", *tokens}
    (dispatcher,) = pods["release-name-dispatcher"]["containers"]
    assert "envFrom" not in dispatcher and dispatcher["securityContext"]["readOnlyRootFilesystem"] is True
    assert not any("secret" in volume for volume in pods["release-name-dispatcher"]["volumes"])
    (text,) = (o["data"]["dispatcher.yaml"] for o in objects if "dispatcher.yaml" in o.get("data", {}))
    assert yaml.safe_load(text) == WITH_RIGHTS["dispatcher"]["settings"]


def test_each_region_has_a_worker_and_the_settings_stay() -> None:
    """The settings of values are kept; those that the chart sets come after them."""
    objects = _rendered(VALUES)
    pods = _pods(objects)
    assert set(pods) == {f"release-name-{part}" for part in ("api", "control", "region-east", "region-west")}
    assert pods["release-name-region-west"]["containers"][0]["args"][-4:] == ["--role", "region", "--region", "west"]
    (init,) = pods["release-name-api"]["initContainers"]
    assert [word for word in init["args"] if "=" in word] == ["east=s3://east/mizzen", "west=gs://west/mizzen"]
    (text,) = (o["data"]["mizzen.yaml"] for o in objects if o["kind"] == "ConfigMap")
    settings = yaml.safe_load(text)
    assert settings["notify"] == {"allow": ["10.0.0.0/8"]}
    assert settings["api"] == {"host": "0.0.0.0", "port": 8080, "key_warning_s": 60}


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"regions": {"East": "s3://b"}},
        {"regions": {"east": "file:///b"}},
        {**VALUES, "regoins": {}},
        {**VALUES, "podNamespaces": "a"},
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    """The schema of the values names what is wrong."""
    with pytest.raises(helm_python.HelmError):
        _rendered(wrong)
