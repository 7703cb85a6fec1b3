"""The contract of layers names every package: one that is left out could import anything."""

import tomllib
from pathlib import Path


def test_every_package_has_its_layer(checkout: Path) -> None:
    """Each folder with code, but the tests', is in the contract, is checked by it, and is installed if it is used."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text())
    linter = project["tool"]["importlinter"]
    (house,) = (contract for contract in linter["contracts"] if contract["type"] == "layers")
    layered = [name.strip() for layer in house["layers"] for name in layer.split("|")]
    folders = {init.parent.name for init in checkout.glob("*/__init__.py")} - {"tests", "tests_integrations"}
    assert sorted(layered) == sorted(linter["root_packages"]) == sorted({*folders, "mizzen"})
    installed = set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    assert folders - installed == {"bench", "experiments"}
