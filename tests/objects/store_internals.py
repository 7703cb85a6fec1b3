"""Helpers that read and damage the internal files of a store, such as unfinished uploads."""

from pathlib import Path
from typing import Any, cast

from mizzen.objects import ObjectStore
from mizzen.objects.files import FileStore
from mizzen.objects.gcs import GCSStore
from mizzen.objects.s3 import S3Store


def raw_names(store: ObjectStore) -> set[str]:
    """Returns the names of everything in the store: objects, staged files and unfinished uploads."""
    if isinstance(store, FileStore):
        return {str(path.relative_to(store._root)) for path in store._root.rglob("*") if path.is_file()}
    if isinstance(store, GCSStore):
        blobs = store._client.list_blobs(store._bucket, prefix=store._prefix)
        return {blob.name.removeprefix(store._prefix) for blob in blobs}
    s3 = cast(S3Store, store)
    asked = {"Bucket": s3._bucket, "Prefix": s3._prefix}
    objects = {found["Key"] for found in s3._client.list_objects_v2(**asked).get("Contents", ())}
    uploads = {f"upload of {found['Key']}" for found in s3._client.list_multipart_uploads(**asked).get("Uploads", ())}
    return {name.removeprefix(s3._prefix) for name in objects | uploads}


def spoil_a_part(store: ObjectStore) -> None:
    """Damages the first part of the store's only unfinished upload."""
    if isinstance(store, FileStore):
        (staged,) = (store._root / ".staging").iterdir()
        with staged.open("r+b") as file:
            _spoil_file(file)
    elif isinstance(store, GCSStore):
        (blob,) = store._client.list_blobs(
            store._bucket, prefix=f"{store._prefix}.staging/", match_glob="**part-000000"
        )
        blob.upload_from_string(bytes(blob.size))
    else:
        s3 = cast(S3Store, store)
        (upload,) = s3._client.list_multipart_uploads(Bucket=s3._bucket, Prefix=s3._prefix)["Uploads"]
        named = {"Bucket": s3._bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
        size = s3._client.list_parts(**named)["Parts"][0]["Size"]
        s3._client.upload_part(**named, PartNumber=1, Body=bytes(size))


def _spoil_file(file: Any) -> None:
    first = file.read(1)
    file.seek(0)
    file.write(bytes([first[0] ^ 1]))


def blocks_bytes(path: Path) -> int:
    """Returns the bytes that the blocks of a file occupy on the disk."""
    return path.stat().st_blocks * 512
