"""Object stores: one interface for a folder, S3 and Google Cloud Storage, and verified copies between them.

A folder needs only the standard library; a cloud's client library is imported when its store is opened. All calls
block: on an event loop, call them in threads. This package must not import other packages of mizzen.
"""

from mizzen.objects.store import Body, MissingObject, ObjectInfo, ObjectStore, check_key
from mizzen.objects.urls import open_store

__all__ = ["Body", "MissingObject", "ObjectInfo", "ObjectStore", "check_key", "open_store"]
