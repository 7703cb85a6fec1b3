"""What can go wrong with a checkpoint.

CheckpointError
    StaleAttemptError: a newer attempt has claimed the root
    CorruptCheckpointError: one checkpoint cannot be used; loading falls back past it
    MissingCheckpointError: there are no checkpoints, or none of the step that was asked for
    MissingLibraryError: a library that is needed to read a checkpoint is not installed
    StateError (also a ValueError): a state cannot be stored as it was given
        NotYetError: not before the first step
"""


class CheckpointError(Exception):
    """Saving or loading cannot go on."""


class StaleAttemptError(CheckpointError):
    """A newer attempt than this process's has claimed the root: this one must not write."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint is partial, damaged, or of a format that this version does not know."""


class MissingCheckpointError(CheckpointError):
    """There is no root here, or it has no such checkpoint; the message says which there are."""


class MissingLibraryError(CheckpointError):
    """A library is not installed; the message says what to install."""


class StateError(CheckpointError, ValueError):
    """A part of the state is of a type that is not stored; the message says where it is and what would be right."""


class NotYetError(StateError):
    """A part of the state has no values yet, as the parameters of a lazy module before its first use."""


class CheckpointWarning(UserWarning):
    """A checkpoint was passed over or not saved, a record is damaged, or something old could not be removed."""
