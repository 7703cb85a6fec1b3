"""A parser of PromQL accepts the expressions of the rules and the dashboard."""

import json
from pathlib import Path

import promql_parser
import yaml

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"


def test_every_expression_is_promql() -> None:
    """No expression has an error of syntax or of types."""
    groups = yaml.safe_load((DEPLOY / "prometheus" / "mizzen.rules.yml").read_text())["groups"]
    panels = json.loads((DEPLOY / "grafana" / "mizzen.json").read_text())["panels"]
    expressions = [rule["expr"] for group in groups for rule in group["rules"]]
    expressions += [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(expressions) > 20
    for expression in expressions:
        promql_parser.parse(expression)
