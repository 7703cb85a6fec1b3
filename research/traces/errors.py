"""The exceptions of readers of traces."""

from infra.errors import ConfigurationError


class TraceError(ConfigurationError):
    """A trace cannot be read, or has bad rows; the message lists them."""
