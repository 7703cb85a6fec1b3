"""Loggers without the cost of the module `logging` at import: it is a tenth of `import mizzen.checkpoint`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logging import Logger


def logger(name: str) -> "Logger":
    """Return the logger of a module. `logging` is imported at the first message."""
    import logging

    return logging.getLogger(name)
