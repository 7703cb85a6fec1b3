"""Prints the JSON Schema of a kind of document that simulations read: `python -m research.schemas simulated-fleet`."""

import click
from pydantic import BaseModel

from domain.documents import json_schema
from research.reclaim.scenario_files import ScenarioDocument
from research.traces.fleet import SimulatedFleet
from server.schemas import printed

KINDS: dict[str, type[BaseModel]] = {"simulated-fleet": SimulatedFleet, "scenario": ScenarioDocument}


@click.command()
@click.argument("kind", type=click.Choice(list(KINDS)))
def main(kind: str) -> None:
    """Print the JSON Schema of a kind of document, for editors."""
    click.echo(printed(json_schema(KINDS[kind])))


if __name__ == "__main__":
    main()
