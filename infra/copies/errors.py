"""Why a copy of an object failed."""


class CopyFailed(Exception):
    """An object could not be copied. No part of it is visible at the target."""


class DamagedSource(CopyFailed):
    """The bytes read from an object do not match its store's digest or its checksum."""


class CopyInUse(CopyFailed):
    """Another process is making the same copy."""
