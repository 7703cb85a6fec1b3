"""Object stores: one small interface over a folder, S3 and Google Cloud Storage, and copying between them.

A folder needs the standard library only; the clouds' libraries are imported when such a store is opened. Blocking:
callers on an event loop use threads. May import nothing else of ours.
"""

from mizzen.objects.store import Body, MissingObject, ObjectInfo, ObjectStore, check_key, open_store

__all__ = ["Body", "MissingObject", "ObjectInfo", "ObjectStore", "check_key", "open_store"]
