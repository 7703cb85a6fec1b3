"""The import contract names every package, because a package outside of it could import anything."""

import tomllib
from pathlib import Path


def test_every_package_has_its_layer(checkout: Path) -> None:
    """Each package except the tests is in the contract and is checked by it; used packages are installed."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text())
    linter = project["tool"]["importlinter"]
    (house,) = (contract for contract in linter["contracts"] if contract["name"] == "Layers, from top to bottom")
    layered = [name.strip() for layer in house["layers"] for name in layer.split("|")]
    folders = {init.parent.name for init in checkout.glob("*/__init__.py")} - {"tests", "tests_integrations"}
    assert sorted(layered) == sorted(linter["root_packages"]) == sorted({*folders, "mizzen", "mizzen_client"})
    installed = set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    assert folders - installed == {"bench", "reference", "research", "rigs"}
