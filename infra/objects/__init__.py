"""Object stores: one small interface over a folder and over S3, and the copying of prefixes between them.

May import nothing of ours. Blocking: callers on an event loop use threads.
"""

from infra.objects.store import MissingObject, ObjectInfo, ObjectStore, check_key, open_store

__all__ = ["MissingObject", "ObjectInfo", "ObjectStore", "check_key", "open_store"]
