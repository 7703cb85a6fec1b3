"""A folder of a project in which each module has the name of one that mizzen imports, and mizzen must not import it."""

import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_CODE = """
from pathlib import Path
(Path(__file__).parent / "imported").open("a").write(f"{__name__}\\n")
raise SystemExit(f"{__file__} was imported")
"""


def packages() -> list[str]:
    """Returns the names of mizzen's own packages, without that of the SDK."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return list(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])


class Decoys:
    """The folder, in which programs are started with the variables `environment`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.environment = {"PYTHONPATH": f"{path / 'src'}"}
        # Python's own modules and the SDK cannot be in a folder of PYTHONPATH: Python itself would import them there.
        for folder, names in (
            (path, {*packages(), "mizzen", *packages_distributions(), *sys.stdlib_module_names}),
            (path / "src", {*packages(), "alembic", "click", "httpx", "sqlalchemy", "temporalio", "uvicorn"}),
        ):
            folder.mkdir(parents=True, exist_ok=True)
            for name in names:
                if name.isidentifier():
                    (folder / f"{name}.py").write_text(_CODE)
        (path / ".numba_config.yaml").write_text("disable_jit: 1\n")

    def imported(self) -> str:
        """Returns the names of the modules that were imported."""
        return "".join(found.read_text() for found in self.path.rglob("imported"))
