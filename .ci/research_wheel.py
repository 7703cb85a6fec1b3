"""Puts `research` and `reference` into the wheel of mizzen-research.

An editable install reads them from the checkout: copies would hide later changes from processes that start elsewhere.
"""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PackagesHook(BuildHookInterface[Any]):
    """See the description of the module."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See `BuildHookInterface.initialize`."""
        if version == "standard":
            build_data["force_include"] |= {"../reference": "reference", "../research": "research"}
