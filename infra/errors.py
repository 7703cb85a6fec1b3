"""Errors that are shown to operators. Each message names the field, the value and the correction."""


class MizzenError(Exception):
    """Base of all errors that mizzen raises for its users."""


class ConfigurationError(MizzenError):
    """A setting, flag or file is invalid."""


class StackError(MizzenError):
    """A part of the embedded stack cannot run, for example because its port or folder is in use or a server fails."""


class CatalogueError(MizzenError):
    """An operation on tables or regions is not possible with the current state of the catalogue."""
