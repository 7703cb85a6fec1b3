"""Resumable uploads to an S3 bucket: a multipart upload, whose id is stored in a temporary object.

S3 confirms each part by its MD5: it rejects a part whose bytes do not match the MD5 in the request, lists the MD5 with
the part, and assembles the object only from parts that still match. For a server-side copy, the checksums that S3 keeps
of the whole source and target are compared; if the source has none, the caller reads and compares both objects.
"""

import hashlib
import re
import time
from base64 import b64encode
from typing import Any

from botocore.exceptions import ClientError

from infra.copies.errors import CopyFailed
from infra.copies.uploads import CopyPlan, Read, Upload
from mizzen.objects.s3_reading import ABSENT, ObjectRef
from mizzen.objects.store import STAGING

MARK = "mizzen-copy"
"""Metadata key of the mark."""
_WHOLE = ("CRC64NVME", "CRC32C", "CRC32")
"""Algorithms for which S3 computes the checksum of the whole object from those of its parts."""
_MD5 = re.compile(r"[0-9a-f]{32}(-[0-9]+)?")


class S3Upload(Upload):
    """An `Upload` to S3. An object of one part is uploaded in one request, by `finish`."""

    def __init__(self, target: ObjectRef, staged: str, plan: CopyPlan, origin: ObjectRef | None) -> None:
        """Create the upload.

        Args:
            target: the object to create.
            staged: name of the temporary object that holds the upload's id.
            plan: the copy.
            origin: the source, if S3 can copy it server-side, else None.
        """
        self.plan = plan
        self._client = target.client
        self._target = target
        self._object = target.asked
        self._staged = {"Bucket": target.bucket, "Key": staged}
        self._body = bytearray()
        self._read: Read = bytearray
        self._upload: dict[str, Any] = {}
        self._parts: dict[int, dict[str, Any]] = {}
        """Part number to the ETag and checksums that S3 returned."""
        # An object of one part is copied server-side only if its ETag is the content's MD5, which verifies the copy.
        simple = plan.parts == 1 and has_md5({"ETag": plan.source_tag}) and "-" not in plan.source_tag
        self._origin = origin if plan.parts > 1 or simple else None
        self._expected = _whole_checksum(self._origin) if self._origin and plan.parts > 1 else None
        self.copies_itself = self._origin is not None

    def missing(self) -> list[int]:
        """Return the parts that are not uploaded yet; see `Upload.missing`."""
        if self.plan.parts > 1:
            self._begin()
        return [number for number in range(self.plan.parts) if number not in self._parts]

    def take(self, number: int, read: Read) -> None:
        """Upload a part; see `Upload.take`."""
        if self.plan.parts == 1:
            self._read = read
            if self._origin is None:
                self._body = read()
            return
        try:
            said = self._put(number, read()) if self._origin is None else self._copied(number, self._origin)
        except ClientError as error:
            raise self._told(error, number) from error
        self._parts[number] = _vouched(said)

    def finish(self) -> bool:
        """Assemble the object; see `Upload.finish`."""
        if self.plan.parts <= 1:
            if self._origin is None or not self._copied_whole(self._origin):
                self._put_whole()
            return True
        parts = [{"PartNumber": number + 1, **self._parts[number]} for number in range(self.plan.parts)]
        whole = {f"Checksum{self._expected[0]}": self._expected[1]} if self._expected else {}
        try:
            said = self._client.complete_multipart_upload(
                **self._upload, MultipartUpload={"Parts": parts}, MpuObjectSize=self.plan.size_bytes, **whole
            )
        except ClientError as error:
            if not self._finished_by_another(error):
                raise self._told(error) from error
        else:
            self._judge(said)
        self._client.delete_object(**self._staged)
        self.proof = self._expected[0].lower() if self._expected else ""
        return self._origin is None or self._expected is not None

    def drop(self) -> None:
        """Remove all uploaded parts; see `Upload.drop`."""
        if self._upload:
            _abort(self._client, self._upload)
        self._client.delete_object(**self._staged)

    def _put_whole(self) -> None:
        md5 = hashlib.md5(self._body, usedforsecurity=False)
        sent = {"Body": self._body, "ContentMD5": b64encode(md5.digest()).decode()}
        said = self._client.put_object(**self._object, **sent, Metadata={MARK: self.plan.mark})
        if damaged := self._damaged(0, said, md5.hexdigest()):
            self._client.delete_object(**self._object)
            raise damaged

    def _copied_whole(self, origin: ObjectRef) -> bool:
        """Copy an object of one part server-side, and compare the MD5 in the ETag.

        Return False if the copy has no MD5 that matches. Then read the source into `_body`, for an ordinary upload.
        """
        copied = {
            "CopySource": {"Bucket": origin.bucket, "Key": origin.name},
            "CopySourceIfMatch": self.plan.source_tag,
        }
        try:
            said = self._client.copy_object(
                **self._object, **copied, Metadata={MARK: self.plan.mark}, MetadataDirective="REPLACE"
            )
        except ClientError as error:
            raise self._told(error) from error
        said = {**said, **said["CopyObjectResult"]}
        found = said["ETag"].strip('"')
        if has_md5(said) and found == self.plan.source_tag:
            self.proof = "md5"
            return True
        self.copies_itself = False
        self._body = self._read()
        return False

    def _put(self, number: int, body: bytearray) -> dict[str, Any]:
        md5 = hashlib.md5(body, usedforsecurity=False)
        sent = {"Body": body, "ContentMD5": b64encode(md5.digest()).decode(), "ChecksumAlgorithm": "CRC32"}
        said: dict[str, Any] = self._client.upload_part(**self._upload, **sent, PartNumber=number + 1)
        if damaged := self._damaged(number, said, md5.hexdigest()):
            # Remove the upload: a resumed copy would find the damaged part in the listing and use it.
            self.drop()
            raise damaged
        return said

    def _copied(self, number: int, origin: ObjectRef) -> dict[str, Any]:
        start, end = self.plan.span(number)
        asked = {
            "CopySource": {"Bucket": origin.bucket, "Key": origin.name},
            "CopySourceIfMatch": self.plan.source_tag,
            "CopySourceRange": f"bytes={start}-{end - 1}",
        }
        said: dict[str, Any] = self._client.upload_part_copy(**self._upload, **asked, PartNumber=number + 1)
        return dict(said["CopyPartResult"])

    def _begin(self) -> None:
        try:
            known = self._client.get_object(**self._staged)["Body"].read().decode()
        except ClientError as error:
            if error.response["Error"]["Code"] not in ABSENT:
                raise
        else:
            self._upload = {**self._object, "UploadId": known}
            found = listed(self._client, self._upload)
            if found is not None:
                for part in found:
                    start, end = self.plan.span(part["PartNumber"] - 1)
                    if part["Size"] == end - start:
                        self._parts[part["PartNumber"] - 1] = _vouched(part)
                return
        # Request a checksum of the whole object, so that later server-side copies of it can be compared.
        algorithm = self._expected[0] if self._expected else "CRC32"
        marked = {} if self._origin and not self._expected else {MARK: self.plan.mark}
        begun = self._client.create_multipart_upload(
            **self._object, Metadata=marked, ChecksumAlgorithm=algorithm, ChecksumType="FULL_OBJECT"
        )
        self._upload = {**self._object, "UploadId": begun["UploadId"]}
        self._client.put_object(**self._staged, Body=begun["UploadId"].encode())

    def _damaged(self, number: int, said: dict[str, Any], md5: str) -> CopyFailed | None:
        found = said["ETag"].strip('"')
        if found == md5 or not has_md5(said):
            return None
        return self.plan.damaged(number, f"md5:{found}", f"md5:{md5}")

    def _judge(self, said: dict[str, Any]) -> None:
        """Compare the finished object with its parts or, after a server-side copy, with its source.

        Raises:
            CopyFailed: they differ.
        """
        if self._origin is None:
            if not has_md5(said) or not all(has_md5(part) for part in self._parts.values()):
                return
            md5s = b"".join(bytes.fromhex(self._parts[n]["ETag"]) for n in range(self.plan.parts))
            expected = f"{hashlib.md5(md5s, usedforsecurity=False).hexdigest()}-{self.plan.parts}"
            found = said["ETag"].strip('"')
            if found == expected:
                return
        elif self._expected is None:
            return
        else:
            expected = "{}:{}".format(*self._expected)
            found = "{}:{}".format(*(_whole_checksum(self._target) or ("none", "")))
            if found == expected:
                return
        self._client.delete_object(**self._object)
        where = self.plan.source.uri(self.plan.source_key)
        raise CopyFailed(f"{self.plan.key} is {found} at the target, in {where} it is {expected}")

    def _finished_by_another(self, error: ClientError) -> bool:
        if error.response["Error"]["Code"] != "NoSuchUpload":
            return False
        try:
            found = self._client.head_object(**self._object)
        except ClientError as absent:
            if absent.response["Error"]["Code"] in ABSENT:
                return False
            raise
        return bool(found.get("Metadata", {}).get(MARK) == self.plan.mark)

    def _told(self, error: Any, number: int | None = None) -> Exception:
        """Translate an error of S3 into a `CopyFailed`; return other errors unchanged."""
        code = error.response["Error"]["Code"]
        where = self.plan.key if number is None else self.plan.describe_part(number)
        if code == "NoSuchUpload":
            return CopyFailed(f"{where}: the unfinished upload was removed; copy it again")
        if code == "PreconditionFailed":
            return CopyFailed(f"{where}: {self.plan.source.uri(self.plan.source_key)} changed during the copy")
        if code in ("InvalidPart", "BadDigest"):
            differences = [
                self.plan.damaged(part["PartNumber"] - 1, f"md5:{found}", f"md5:{expected}")
                for part in listed(self._client, self._upload) or ()
                if (found := _vouched(part)["ETag"]) != (expected := self._parts[part["PartNumber"] - 1]["ETag"])
            ]
            self.drop()
            return differences[0] if differences else CopyFailed(f"{where}: S3 has other bytes than sent: {error}")
        told: Exception = error
        return told


def listed(client: Any, upload: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the parts of an unfinished upload; None if the upload no longer exists."""
    try:
        pages = client.get_paginator("list_parts").paginate(**upload)
        return [part for page in pages for part in page.get("Parts", ())]
    except ClientError as error:
        if error.response["Error"]["Code"] == "NoSuchUpload":
            return None
        raise


def tidy_uploads(client: Any, bucket: str, prefix: str, idle_s: float) -> None:
    """Remove uploads below `prefix` that received no part for `idle_s` seconds, and temporary objects of ended ones."""
    before_s = time.time() - idle_s
    live: set[str] = set()
    for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix):
        for found in page.get("Uploads", ()):
            upload = {"Bucket": bucket, "Key": found["Key"], "UploadId": found["UploadId"]}
            seen = [part["LastModified"] for part in listed(client, upload) or ()]
            if max([found["Initiated"], *seen]).timestamp() <= before_s:
                _abort(client, upload)
            else:
                live.add(found["UploadId"])
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}{STAGING}/"):
        for found in page.get("Contents", ()):
            note = {"Bucket": bucket, "Key": found["Key"]}
            if found["LastModified"].timestamp() > before_s:
                continue
            try:
                used = client.get_object(**note)["Body"].read().decode() in live
            except ClientError as error:
                if error.response["Error"]["Code"] not in ABSENT:
                    raise
                continue
            if not used:
                client.delete_object(**note)


def _whole_checksum(of: ObjectRef) -> tuple[str, str] | None:
    """Return algorithm and checksum of the whole content that the store keeps; None if it keeps none."""
    found = of.client.head_object(**of.asked, ChecksumMode="ENABLED")
    if found.get("ChecksumType", "COMPOSITE" if "-" in found["ETag"] else "FULL_OBJECT") == "FULL_OBJECT":
        for algorithm in _WHOLE:
            if value := found.get(f"Checksum{algorithm}"):
                return algorithm, value
    return None


def _abort(client: Any, upload: dict[str, Any]) -> None:
    try:
        client.abort_multipart_upload(**upload)
    except ClientError as error:
        if error.response["Error"]["Code"] != "NoSuchUpload":
            raise


def _vouched(said: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a part that S3 requires to complete the upload."""
    checksums = {name: value for name, value in said.items() if name.startswith("Checksum") and name != "ChecksumType"}
    return {"ETag": said["ETag"].strip('"'), **checksums}


def has_md5(said: dict[str, Any]) -> bool:
    """Return whether the ETag is an MD5, or an MD5 of MD5s. It is not if a KMS or customer key encrypts the object, nor
    in every compatible store.

    Even then, the store has compared the uploaded bytes with the MD5 and CRC-32 of the request.
    """
    keys = str(said.get("ServerSideEncryption", "")).startswith("aws:kms") or "SSECustomerAlgorithm" in said
    return not keys and _MD5.fullmatch(said["ETag"].strip('"')) is not None
