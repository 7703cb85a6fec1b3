"""`python -m tests.agent.fleet_process FILE`: runs the agents of the machines in a JSON file.

The file contains `{"temporal": {...}, "machines": [{...}]}`.
"""

import logging
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from agent.config import AgentConfig
from agent.fleet import serve_many
from infra.config.services import TemporalSettings
from infra.errors import MizzenError


class FleetFile(BaseModel):
    """Content of the JSON file: Temporal's settings and the configuration of each machine."""

    model_config = ConfigDict(extra="forbid")

    temporal: TemporalSettings
    machines: list[AgentConfig]


def main() -> int:
    """Runs the agents until they are stopped. Returns the exit code, 2 if the arguments or the file are invalid."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if len(sys.argv) != 2:
        print("usage: python -m tests.agent.fleet_process FILE", file=sys.stderr)
        return 2
    try:
        file = FleetFile.model_validate_json(Path(sys.argv[1]).read_bytes())
        serve_many(file.machines, file.temporal)
    except (OSError, ValidationError, ValueError, MizzenError) as error:
        print(f"{sys.argv[1]}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
