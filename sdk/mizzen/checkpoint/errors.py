"""Exceptions and warnings of `mizzen.checkpoint`.

CheckpointError
    StaleAttemptError: a newer attempt has claimed the root
    CorruptCheckpointError: a checkpoint is damaged; loading falls back to an older one
    MissingCheckpointError: there is no checkpoint, or none of the requested step
    MissingLibraryError: a library that is needed to read a checkpoint is not installed
    StateError (also a ValueError): a value in the state cannot be stored
        NotYetError: it can be stored only after the first step
"""


class CheckpointError(Exception):
    """A checkpoint could not be saved or loaded."""


class StaleAttemptError(CheckpointError):
    """A newer attempt has claimed the root, so this process must not write there."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint is incomplete, damaged, or in a format that this version cannot read."""


class MissingCheckpointError(CheckpointError):
    """The root does not exist, or has no such checkpoint. The message lists the steps that exist."""


class MissingLibraryError(CheckpointError):
    """A required library is not installed. The message names the package to install."""


class StateError(CheckpointError, ValueError):
    """A value in the state cannot be stored. The message gives its path in the state and the supported types."""


class NotYetError(StateError):
    """A value in the state does not exist yet, such as a parameter of a lazy module before its first forward pass."""


class CheckpointWarning(UserWarning):
    """A checkpoint was skipped or not saved, a log record is damaged, or old data could not be removed."""
