"""The configuration of an agent."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agent.config import AgentConfig


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"machine": "r1/other/m1"}, "machine"),
        ({"ports": (5, 4)}, "ports 5 to 4"),
        ({"ports": (0, 70000)}, "ports"),
        ({"run_as": "nobody-of-this-name"}, "run_as"),
        ({"region": "R1"}, "region"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_configurations_that_make_no_sense(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    """An invalid configuration is rejected with its field and value."""
    base = {
        "machine": "r1/c1/m1",
        "region": "r1",
        "cluster": "c1",
        "rack": "k",
        "cpus_milli": 1,
        "memory_bytes": 1,
        "address": "a",
        "ports": (1, 2),
        "state_dir": tmp_path,
    }
    AgentConfig.model_validate(base)
    with pytest.raises(ValidationError, match=said):
        AgentConfig.model_validate(base | change)
