"""The compose file: its form, and that no container of mizzen has privileges."""

import json
import re
from pathlib import Path

import yaml
from compose_spec import PyCompose

FILE = Path(__file__).resolve().parent.parent / "deploy" / "compose" / "compose.yaml"


def test_the_form_of_the_compose_file() -> None:
    """The specification of compose accepts it; each volume and dependency exists; passwords have no default."""
    text = FILE.read_text()
    given = re.sub(r"\$\{\w+(?::-([^}]*)|:\?[^}]*)?\}", lambda found: found[1] or "given", text)
    # Its own reader of YAML does not merge the mappings of `<<`.
    compose = PyCompose.from_json(json.dumps(yaml.safe_load(given)))
    compose.validate()
    found = compose.to_dict()
    assert set(compose.service_names()) == {
        "postgres", "temporal-postgres", "temporal", "init", "api", "control", "region",
    }  # fmt: skip
    for service in found["services"].values():
        assert set(service.get("depends_on", ())) <= set(found["services"])
    for name in ("init", "api", "control", "region"):
        own = found["services"][name]
        assert own["cap_drop"] == ["ALL"] and own["read_only"] is True
        assert "no-new-privileges:true" in own["security_opt"]
    assert "PASSWORD:-" not in text
