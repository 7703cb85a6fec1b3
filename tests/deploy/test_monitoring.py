"""The rules of Prometheus and the dashboard of Grafana name only metrics and labels that the API exports."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from api.metrics import InstallationCollector
from tests.api.conftest import serve, shared_world
from tests.api.world import ApiWorld

__all__ = ["serve", "shared_world"]
RULES, DASHBOARD = "deploy/prometheus/mizzen.rules.yml", "deploy/grafana/mizzen.json"
_METRIC = re.compile(r"\bmizzen[a-z0-9_:]*")
_LABELS = re.compile(r"(mizzen[a-z0-9_:]*)\{([^}]*)\}")
_BY = re.compile(r"\bby \(([^)]*)\)")
_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}


def _rules(checkout: Path) -> list[dict[str, str]]:
    groups = yaml.safe_load((checkout / RULES).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _queries(checkout: Path) -> Iterator[tuple[str, str]]:
    """Yields each expression with the text of its legend or annotation."""
    for rule in _rules(checkout):
        yield rule["expr"], json.dumps(rule.get("annotations", {}))
    for panel in json.loads((checkout / DASHBOARD).read_text())["panels"]:
        for target in panel["targets"]:
            yield target["expr"], target["legendFormat"]


async def _exported(world: ApiWorld) -> dict[str, set[str]]:
    """Returns the labels of each series that the API exports, by name."""
    found: dict[str, set[str]] = {}
    for family in InstallationCollector(world.engine).collect():
        for suffix in _SUFFIXES.get(family.type, ("",)):
            found[family.name + suffix] = set(family._labelnames)  # type: ignore[attr-defined]
    async with world.client(None) as client:
        await client.get("/healthz")
        text = (await client.get("/metrics")).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


async def test_every_metric_and_label_is_exported(shared_world: ApiWorld, checkout: Path) -> None:
    """A metric or label of an expression, and a label of a legend, exists; so do the recorded series."""
    exported = await _exported(shared_world)
    recorded = {rule["record"]: set(_grouped(rule["expr"])) for rule in _rules(checkout) if "record" in rule}
    series = exported | recorded
    for expression, legend in _queries(checkout):
        names = set(_METRIC.findall(expression))
        assert names <= series.keys(), f"{expression}: {names - series.keys()} is not exported"
        labels = set().union(*(series[name] for name in names))
        for name, matchers in _LABELS.findall(expression):
            asked = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
            assert asked <= series[name], f"{expression}: {name} has no label {asked - series[name]}"
        grouped = set(_grouped(expression))
        assert grouped <= labels | {"le"}, f"{expression}: no metric of it has the labels {grouped - labels}"
        shown = set(re.findall(r"{{ ?(?:\$labels\.)?(\w+) ?}}", legend))
        kept = grouped or (labels if "(" not in expression else set())
        assert shown <= kept, f"{expression}: {legend} shows {shown - kept}"


def _grouped(expression: str) -> list[str]:
    return [label.strip() for labels in _BY.findall(expression) for label in labels.split(",")]


def test_every_alert_says_what_it_means(checkout: Path) -> None:
    """Each alert has a unique name, a severity and a summary."""
    alerts = [rule for rule in _rules(checkout) if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts)
    for rule in alerts:
        assert rule["labels"]["severity"] in ("page", "ticket") and rule["annotations"]["summary"]  # type: ignore[index]


def test_prometheus_accepts_the_rules(checkout: Path) -> None:
    """Prometheus's own checker (Debian's package prometheus) finds no error."""
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run([promtool, "check", "rules", checkout / RULES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
