"""Copies htmx, the only script of the console that others wrote, from the wheel of django-htmx to `console/static`."""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_COPY = "console/static/htmx.js"


class HtmxHook(BuildHookInterface[Any]):
    """The copy is in the wheel, and, of an editable install, in the checkout. Git ignores it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See `BuildHookInterface`."""
        # `find_spec` does not import the package, which needs Django.
        spec = importlib.util.find_spec("django_htmx")
        assert spec is not None and spec.origin is not None
        source = Path(spec.origin).parent / "static" / "django_htmx" / "htmx-4.min.js"
        target = Path(self.root) / _COPY
        if not target.exists() or target.read_bytes() != source.read_bytes():
            shutil.copyfile(source, target)
        build_data["artifacts"].append(f"/{_COPY}")
