"""Copies of objects between the buckets of regions: in parts, verified, resumable, within a share of the bandwidth.

The stores are those of `mizzen.objects`, extended by resumable uploads and by the digests that clouds publish.
"""

from pathlib import Path

from infra.copies.uploads import CopyStore
from mizzen.objects.urls import naming_the_extra, parts_of

__all__ = ["CopyStore", "open_copy_store"]


def open_copy_store(url: str) -> CopyStore:
    """Open a store from and to which objects are copied; see `mizzen.objects.open_store`."""
    scheme, place, prefix = parts_of(url)
    with naming_the_extra(url):
        if scheme == "file":
            from infra.copies.files import FileCopyStore

            return FileCopyStore(Path(place))
        if scheme == "s3":
            from infra.copies.s3 import S3CopyStore

            return S3CopyStore(place, prefix)
        from infra.copies.gcs import GCSCopyStore

        return GCSCopyStore(place, prefix)
