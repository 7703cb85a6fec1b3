"""Errors that reach an operator: each names the field, the value and what would be right."""


class MizzenError(Exception):
    """Base of all errors that mizzen raises for its users."""


class ConfigurationError(MizzenError):
    """A setting, flag or file that cannot be used as it is."""


class StackError(MizzenError):
    """A part of the embedded stack cannot run: a taken port, a folder in use, a server that does not come up."""


class CatalogueError(MizzenError):
    """What is known of regions and tables does not suffice for what was asked."""
