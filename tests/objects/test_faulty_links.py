"""Copies over faulty links: the object at the target is correct, or the copy is an error and creates no object."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bench import buckets
from infra.copies import CopyStore, open_copy_store
from infra.copies.copy import Copied, CopyFailed, DamagedSource, copy_prefix
from mizzen.objects import checksums, retries
from tests.objects.copies import PART, bytes_of, copied_object, copy
from tests.objects.faulty import Answer, Proxy, proxy
from tests.objects.store_internals import raw_names

REFUSED = """<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>{code}</Code><Message>{message}</Message><RequestId>1</RequestId></Error>"""


@pytest.fixture
def s3_link(s3_endpoint: buckets.EmulatorEndpoint) -> Iterator[Proxy]:
    """Yields a proxy to the S3 server, without a fault."""
    with proxy(s3_endpoint.url) as found:
        yield found


@pytest.fixture
def far(s3_link: Proxy, bucket_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> CopyStore:
    """Returns an empty S3 store behind the proxy."""
    monkeypatch.setattr(retries, "_PAUSE_S", 0.0)
    url = bucket_of("s3")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_link.url)
    return open_copy_store(url)


@pytest.fixture
def near(bucket_of: Callable[[str], str]) -> CopyStore:
    """Returns an empty store in a folder."""
    return open_copy_store(bucket_of("file"))


def flip(answer: Answer) -> None:
    """Flips a bit of the last byte of each response with content."""
    if answer.is_content and answer.body:
        answer.body = answer.body[:-1] + bytes([answer.body[-1] ^ 1])


def put_in_parts(store: Any, body: bytes, part_bytes: int) -> None:
    """Puts `a/x` by a multipart upload."""
    client, place = store._client, {"Bucket": store._bucket, "Key": store._name("a/x")}
    upload = {**place, "UploadId": client.create_multipart_upload(**place)["UploadId"]}
    parts = []
    for number, start in enumerate(range(0, len(body), part_bytes), 1):
        part = client.upload_part(**upload, PartNumber=number, Body=body[start : start + part_bytes])
        parts.append({"PartNumber": number, "ETag": part["ETag"]})
    client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})


@pytest.mark.parametrize("put_bytes", [None, 700, 3 * PART])
@pytest.mark.parametrize("size", [PART, 5 * PART + 1])
def test_flipped_bytes_are_noticed(
    size: int, put_bytes: int | None, s3_link: Proxy, far: CopyStore, near: CopyStore
) -> None:
    """A flipped byte from S3 is an error with both digests, for whole and multipart objects of any number of parts."""
    body = bytes_of(size, size)
    if put_bytes is None:
        far.put("a/x", body)
    else:
        put_in_parts(far, body, put_bytes)
    s3_link.fault = flip
    with pytest.raises(DamagedSource, match=r"region-a/a/x: damaged .*: read md5:\w{32}, the store has md5:\w{32}"):
        copy(far, near)
    assert near.stat("a/x") is None and raw_names(near) == set()
    s3_link.fault = lambda _: None
    assert copied_object(far, near).verified == "md5"
    assert near.get("a/x") == body
    assert copied_object(far, near) == Copied("a/x", size, 0, "md5")


def test_bytes_that_a_killed_copy_read_are_in_the_digest(s3_link: Proxy, far: CopyStore, near: CopyStore) -> None:
    """Damage that was read before an interruption is detected by the resumed copy."""
    far.put("a/x", bytes_of(1, 6 * PART))
    s3_link.fault = flip

    def stop(done: int, _: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy(far, near, progress=stop)
    assert raw_names(near)
    s3_link.fault = lambda _: None
    with pytest.raises(DamagedSource, match="read md5"):
        copy(far, near)
    assert copy(far, near) == 6 * PART
    assert near.get("a/x") == far.get("a/x")


def test_flipped_bytes_from_google_are_noticed(
    gcs_endpoint: buckets.EmulatorEndpoint,
    near: CopyStore,
    bucket_of: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A flipped byte from Google Cloud Storage is an error, found by the digest of the service."""
    with proxy(gcs_endpoint.url) as link:
        url = bucket_of("gcs")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", link.url)
        far = open_copy_store(url)
        for size in (PART, 3 * PART):
            far.put("a/x", bytes_of(size, size))
            link.fault = flip
            with pytest.raises(DamagedSource, match=r"a/x: damaged .*: read (md5|crc32c):\w+, the store has \1:\w+"):
                copy(far, near)
            assert raw_names(near) == set()
            link.fault = lambda _: None
            assert copied_object(far, near).verified == "md5"
            near.delete("a/x")


def test_what_no_store_vouches_for_is_told(bucket_of: Callable[[str], str], near: CopyStore) -> None:
    """Copies from a folder, which has no digests, are unverified without a given checksum; S3 objects have digests."""
    far, bodies = open_copy_store(bucket_of("s3")), {f"t/{n}": bytes_of(n, 100) for n in range(6)}
    for key, body in bodies.items():
        near.put(key, body)
    told: list[Copied] = []
    copy_prefix(near, far, "t/", name="t", copied=told.append)
    assert told == [Copied(key, 100, 100, "") for key in bodies]
    near.put("a/x", bytes_of(7, 3 * PART))
    near.put("a/y", bytes_of(7, PART))
    for key, size in (("a/x", 3 * PART), ("a/y", PART)):
        checksum = checksums.checksum("sha256", [near.get(key)])
        assert copied_object(near, far, key, checksum=checksum) == Copied(key, size, size, "sha256")
        assert copied_object(near, far, key, checksum=checksum) == Copied(key, size, 0, "sha256")
    with pytest.raises(DamagedSource, match=r"a/y: sha256:\w+, expected sha256:0"):
        copied_object(near, far, "a/y", to="b", checksum="sha256:0")
    other = open_copy_store(bucket_of("s3"))
    told.clear()
    copy_prefix(far, other, "t/", name="t", copied=told.append)
    assert told == [Copied(key, 100, 100, "md5") for key in bodies]


def test_bodies_that_are_cut_are_continued(s3_link: Proxy, far: CopyStore, near: CopyStore) -> None:
    """A truncated response is continued at the first missing byte, any number of times, as long as bytes arrive."""
    for size in (9 * retries._PROGRESS_BYTES, 20 * retries._PROGRESS_BYTES):
        body = bytes_of(2, size)
        far.put("a/x", body)

        def cut(answer: Answer) -> None:
            if answer.is_content and len(answer.body) > retries._PROGRESS_BYTES:
                answer.sent_bytes = retries._PROGRESS_BYTES

        s3_link.requests.clear()
        s3_link.fault = cut
        assert copied_object(far, near, part_bytes=10 * retries._PROGRESS_BYTES).verified == "md5"
        assert near.get("a/x") == body
        gets = [asked for method, asked in s3_link.requests if method == "GET"]
        assert len(gets) == size // retries._PROGRESS_BYTES > retries.TRIES
        assert len(set(gets)) == len(gets), "a range was requested twice"


@pytest.mark.parametrize("size", [3 * PART, PART])
def test_bodies_without_progress_end_the_copy(size: int, s3_link: Proxy, far: CopyStore, near: CopyStore) -> None:
    """If responses deliver no bytes, the copy fails after `retries.TRIES` requests and creates no object."""
    far.put("a/x", bytes_of(3, size))

    def cut(answer: Answer) -> None:
        if answer.is_content:
            answer.sent_bytes = 0

    s3_link.fault = cut
    with pytest.raises(Exception, match=r"(?i)incomplete|missing|ended|broken|body"):
        copy(far, near)
    assert near.stat("a/x") is None
    by_range = [asked for method, asked in s3_link.requests if method == "GET"]
    assert max(map(by_range.count, by_range)) <= retries.TRIES


@pytest.mark.parametrize("lie", ["all of it", "another range", "too short", "too long"])
def test_lies_about_lengths(lie: str, s3_link: Proxy, far: CopyStore, near: CopyStore) -> None:
    """If a response ignores the range, has another one, or has a wrong length, the copy fails and creates no object."""
    far.put("a/x", bytes_of(4, 3 * PART))
    far.put("a/small", bytes_of(4, PART))

    def change(answer: Answer) -> None:
        if not answer.is_content:
            return
        if lie == "all of it":
            answer.status, answer.body = 200, bytes_of(4, 3 * PART)
            answer.headers.pop("content-range", None)
        elif lie == "another range":
            answer.headers["content-range"] = f"bytes 7-{6 + PART}/{3 * PART}"
        else:
            answer.body = answer.body[:-1] if lie == "too short" else answer.body + b"x"

    s3_link.fault = change
    key = "a/small" if lie == "too long" else "a/x"
    with pytest.raises(Exception, match=r"requested bytes|changed while|missing"):
        copied_object(far, near, key)
    assert near.stat(key) is None and list(near.list("")) == []


def test_a_store_that_is_busy_is_asked_again(s3_link: Proxy, far: CopyStore, near: CopyStore) -> None:
    """Requests that get a 503 response are retried, and the copy succeeds."""
    far.put("a/x", bytes_of(5, 3 * PART))
    seen: set[tuple[str, str, str]] = set()

    def refuse(answer: Answer) -> None:
        request = answer.method, answer.path, answer.asked.get("range", "")
        if request not in seen:
            seen.add(request)
            answer.status, answer.headers = 503, {}
            answer.body = REFUSED.format(code="SlowDown", message="Reduce your request rate.").encode()

    s3_link.fault = refuse
    assert copy(far, near) == 3 * PART
    assert near.get("a/x") == bytes_of(5, 3 * PART)


@pytest.mark.parametrize(("code", "status"), [("SignatureDoesNotMatch", 403), ("InvalidAccessKeyId", 403)])
def test_wrong_credentials_name_the_bucket(
    code: str, status: int, s3_link: Proxy, far: CopyStore, near: CopyStore
) -> None:
    """If S3 rejects the credentials, the error has the bucket, the region and the endpoint."""
    near.put("a/x", b"body")

    def refuse(answer: Answer) -> None:
        answer.status, answer.headers = status, {}
        answer.body = b"" if answer.method == "HEAD" else REFUSED.format(code=code, message="No.").encode()

    s3_link.fault = refuse
    bucket = far.uri("").split("/")[2]
    where = rf"s3://{bucket} \(region us-east-1, {s3_link.url}\)"
    uses: list[Callable[[], object]] = [
        lambda: copy(near, far),
        lambda: copy(far, near),
        lambda: list(far.list("")),
        lambda: far.get("a/x"),
        lambda: far.put("a/x", b"y"),
    ]
    for use in uses:
        with pytest.raises(Exception, match=where):
            use()


def test_no_credentials_name_the_bucket(
    bucket_of: Callable[[str], str], near: CopyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If there are no credentials, the error has the bucket and the region."""
    url = bucket_of("s3")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    near.put("a/x", b"body")
    with pytest.raises(Exception, match=rf"no credentials for s3://{url.split('/')[2]} \(region us-east-1, http"):
        copy(near, open_copy_store(url))


def test_small_objects_are_copied_at_the_same_time(s3_link: Proxy, far: CopyStore, near: CopyStore) -> None:
    """Eight small objects are copied concurrently: the store responds only after it has received eight requests."""
    bodies = {f"a/{n:02d}": bytes_of(n, 50) for n in range(16)}
    for key, body in bodies.items():
        far.put(key, body)
    eight = threading.Barrier(8)

    def gather(answer: Answer) -> None:
        if answer.is_content:
            eight.wait(timeout=20)

    s3_link.fault = gather
    assert copy_prefix(far, near, "a/", name="t") == 16 * 50
    assert {info.key: near.get(info.key) for info in near.list("")} == bodies
    requests = len(s3_link.requests)
    s3_link.fault = lambda _: None
    assert requests <= 16 + 16 + 4, "too many requests: expected a put and a get for each object, and listings"


def test_one_that_fails_ends_the_copy(s3_link: Proxy, far: CopyStore, near: CopyStore) -> None:
    """After a failed object, running copies finish and no new ones start; the next call copies the missing objects."""
    for n in range(60):
        far.put(f"a/{n:02d}", bytes_of(n, 50))

    def spoil(answer: Answer) -> None:
        if answer.path.endswith("a/07"):
            flip(answer)

    s3_link.fault = spoil
    with pytest.raises(CopyFailed, match="a/07: damaged"):
        copy_prefix(far, near, "a/", name="t")
    there = {info.key for info in near.list("")}
    assert "a/07" not in there and len(there) < 59
    assert all(near.get(key) == bytes_of(int(key[2:]), 50) for key in there)
    s3_link.fault = lambda _: None
    told: list[Copied] = []
    assert copy_prefix(far, near, "a/", name="t", copied=told.append) == 60 * 50
    assert {one.key for one in told if one.moved_bytes == 0} == there
    assert raw_names(near) == {f"a/{n:02d}" for n in range(60)}
