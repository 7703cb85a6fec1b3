"""Copies between stores: atomic, verified, and resumable after the parts that are already stored."""

from collections.abc import Callable
from typing import Any

import pytest

from infra.copies import CopyStore, open_copy_store
from infra.copies.copy import CopyFailed, Wanted, copy_objects, copy_prefix
from mizzen.objects import MissingObject
from mizzen.objects import checksums as sums
from tests.objects.copies import PART, Watched, bytes_of, copy
from tests.objects.store_internals import raw_names, spoil_a_part

PAIRS = [("file", "file"), ("file", "s3"), ("s3", "s3"), ("gcs", "gcs"), ("s3", "gcs"), ("gcs", "file")]
STREAMED = [("file", "file"), ("file", "s3"), ("file", "gcs")]


@pytest.fixture
def pair(request: pytest.FixtureRequest, bucket_of: Callable[[str], str]) -> tuple[CopyStore, CopyStore]:
    """Returns a source store and a target store."""
    source, target = (open_copy_store(bucket_of(kind)) for kind in request.param)
    return source, target


@pytest.mark.parametrize("pair", PAIRS, indirect=True)
def test_every_size_arrives(pair: tuple[CopyStore, CopyStore]) -> None:
    """Objects of any size, from empty to many parts, are copied exactly, and no temporary files remain."""
    source, target = pair
    # Google's compose request accepts at most 32 objects.
    parts = 33 if target.uri("").startswith("gs:") else 4
    for size in (0, 1, PART, PART + 1, 2 * PART, parts * PART + 7):
        body = bytes_of(size, size)
        source.put("a/x", body)
        told: list[tuple[int, int]] = []
        assert copy(source, target, progress=lambda done, total, told=told: told.append((done, total))) == size
        assert target.get("a/x") == body
        assert told == sorted(told) and told[-1] == (size, size)
        assert raw_names(target) == {"a/x"}
        assert copy(source, target) == 0, "a repeated copy moved bytes"


@pytest.mark.parametrize("pair", STREAMED, indirect=True)
def test_an_interrupted_copy_goes_on(pair: tuple[CopyStore, CopyStore]) -> None:
    """A resumed copy does not read or store again the parts that were stored before the failure."""
    inner, target = pair
    body = bytes_of(1, 20 * PART + 1)
    inner.put("a/x", body)

    def fail(start: int) -> None:
        if start == 9 * PART:
            raise ConnectionError("the source is unavailable")

    broken = Watched(inner, fail)
    with pytest.raises(ConnectionError):
        copy(broken, target)
    assert target.stat("a/x") is None and list(target.list("")) == []
    assert broken.read_bytes >= PART
    whole = Watched(inner)
    assert copy(whole, target) == whole.read_bytes == len(body) - broken.read_bytes
    assert target.get("a/x") == body
    assert raw_names(target) == {"a/x"}


@pytest.mark.parametrize("pair", [("s3", "s3")], indirect=True)
def test_what_s3_copied_by_itself_is_not_copied_again(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within S3 the server copies the parts, and a resumed copy requests only the missing ones."""
    source, target = pair
    source.put("a/x", bytes_of(2, 8 * PART))
    asked: list[int] = []
    failing = True

    def note(params: Any, **_: Any) -> None:
        asked.append(params["query_string"]["partNumber"])
        if failing and len(asked) > 3:
            raise ConnectionError("S3 is unavailable")

    target._client.meta.events.register("before-call.s3.UploadPartCopy", note)
    with pytest.raises(ConnectionError):
        copy(source, target)
    failing, first = False, asked[:3]
    asked.clear()
    monkeypatch.setattr(source, "_fetch", lambda *_: pytest.fail("the content was read by this process"))
    assert copy(source, target) == 5 * PART
    assert sorted(asked + first) == list(range(1, 9))
    assert target.get("a/x") == source.get("a/x")


@pytest.mark.parametrize("pair", STREAMED, indirect=True)
def test_a_source_that_changes_is_noticed(pair: tuple[CopyStore, CopyStore]) -> None:
    """If the source changes during a copy, the copy fails and creates no object; the next copy has the new content."""
    inner, target = pair
    for size in (6 * PART, 2 * PART, None):
        inner.put("a/x", bytes_of(3, 6 * PART))

        def change(start: int, size: int | None = size) -> None:
            if start == 5 * PART:
                inner.delete("a/x") if size is None else inner.put("a/x", bytes_of(4, size))

        with pytest.raises(CopyFailed, match=r"a/x changed while it was copied"):
            copy(Watched(inner, change), target)
        assert target.stat("a/x") is None
        target.tidy_uploads(0)
        assert raw_names(target) == set()
    inner.put("a/x", bytes_of(5, 2 * PART))
    copy(inner, target)
    assert target.get("a/x") == bytes_of(5, 2 * PART)


@pytest.mark.parametrize("pair", [*STREAMED, ("s3", "s3")], indirect=True)
def test_a_part_that_is_damaged_at_the_target_is_noticed(pair: tuple[CopyStore, CopyStore]) -> None:
    """If a part is damaged at the target, the error has both digests, no object appears, and the next copy succeeds."""
    source, target = pair
    source.put("a/x", bytes_of(6, 4 * PART))

    def spoil(done: int, _: int) -> None:
        if done == 3 * PART:
            spoil_a_part(target)

    with pytest.raises(CopyFailed, match=r"part 1 of 4 at the target is (\w+):\w+, in .*a/x it is \1:\w+"):
        copy(source, target, progress=spoil)
    assert target.stat("a/x") is None and raw_names(target) == set()
    assert copy(source, target) == 4 * PART
    assert target.get("a/x") == source.get("a/x")


def test_a_part_that_is_damaged_on_its_way_is_noticed(bucket_of: Callable[[str], str]) -> None:
    """The digest in S3's response is compared with the sent bytes, for parts and for small objects."""
    source, target = open_copy_store(bucket_of("file")), open_copy_store(bucket_of("s3"))
    events = target._client.meta.events  # type: ignore[attr-defined]

    def spoil(response_dict: dict[str, Any], **_: Any) -> None:
        response_dict["headers"]["ETag"] = f'"{"0123" * 8}"'

    for operation, size in (("UploadPart", 2 * PART), ("PutObject", PART)):
        source.put("a/x", bytes_of(7, size))
        events.register(f"before-parse.s3.{operation}", spoil)
        with pytest.raises(CopyFailed, match=r"is md5:(0123){8}, in .* it is md5:[0-9a-f]{32}"):
            copy(source, target)
        assert raw_names(target) == set()


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("CRC32", r"a/x is CRC32:\S+ at the target, in s3://\S+ it is CRC32:"),
        ("SHA256", r"a/x: part 1 of 3 is xxh3_128:\w+ at the target, xxh3_128:\w+ in the source"),
    ],
)
def test_what_s3_copied_wrong_is_noticed(algorithm: str, message: str, bucket_of: Callable[[str], str]) -> None:
    """A wrong server-side copy is detected by S3's checksum, or by reading both objects if the source has none."""
    source, target = open_copy_store(bucket_of("s3")), open_copy_store(bucket_of("s3"))
    client, place = source._client, {"Bucket": source._bucket, "Key": source._name("a/x")}  # type: ignore[attr-defined]
    body = bytes_of(8, 3 * PART)
    if algorithm == "CRC32":
        client.put_object(**place, Body=body)
    else:
        upload = client.create_multipart_upload(**place, ChecksumAlgorithm="SHA256")["UploadId"]
        part = client.upload_part(**place, UploadId=upload, PartNumber=1, Body=body, ChecksumAlgorithm="SHA256")
        parts = [{"PartNumber": 1, "ETag": part["ETag"]}]
        client.complete_multipart_upload(**place, UploadId=upload, MultipartUpload={"Parts": parts})
    failing = True

    def replace(**_: Any) -> None:
        if failing:
            target.put("a/x", bytes(3 * PART))

    target._client.meta.events.register("after-call.s3.CompleteMultipartUpload", replace)  # type: ignore[attr-defined]
    with pytest.raises(CopyFailed, match=message):
        copy(source, target)
    assert target.stat("a/x") is None
    failing = False
    assert copy(source, target) == 3 * PART
    assert copy(source, target) == 0
    assert target.get("a/x") == body


@pytest.mark.parametrize("pair", [("gcs", "gcs")], indirect=True)
def test_an_unfinished_rewrite_goes_on(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted rewrite resumes with the stored token of the service; a wrong copy by the service is an error."""
    source, target = pair
    source.put("a/x", bytes_of(9, 3 * PART))
    kind = type(target._blob("a/x"))
    rewrite = kind.rewrite
    tokens: list[str | None] = []

    def partly(blob: Any, other: Any, token: str | None = None, **asked: Any) -> Any:
        tokens.append(token)
        if len(tokens) == 1:
            return "there", PART, 3 * PART
        if len(tokens) == 2:
            raise ConnectionError("the service is unavailable")
        return rewrite(blob, other, **asked)

    monkeypatch.setattr(kind, "rewrite", partly)
    with pytest.raises(ConnectionError):
        copy(source, target)
    assert target.stat("a/x") is None
    copy(source, target)
    assert tokens[:3] == [None, "there", "there"]
    assert target.get("a/x") == source.get("a/x") and raw_names(target) == {"a/x"}

    def wrong(blob: Any, other: Any, **_: Any) -> Any:
        blob.upload_from_string(bytes(3 * PART))
        return None, 3 * PART, 3 * PART

    monkeypatch.setattr(kind, "rewrite", wrong)
    target.delete("a/x")
    with pytest.raises(CopyFailed, match=r"is crc32c:\S+, in gs://\S+ it is crc32c:"):
        copy(source, target)
    assert raw_names(target) == set()


@pytest.mark.parametrize("kind", ["s3", "gcs"])
def test_another_one_finishes_first(
    kind: str, bucket_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If two processes run the same copy concurrently, one creates the object and the other one finds it."""
    source, target = open_copy_store(bucket_of("file")), open_copy_store(bucket_of(kind))
    source.put("a/x", bytes_of(10, 3 * PART))
    moved: list[int] = []

    def overtake(**_: Any) -> None:
        if not moved:
            moved.append(-1)
            moved[0] = copy(source, target)

    if kind == "s3":
        events = target._client.meta.events  # type: ignore[attr-defined]
        events.register("before-call.s3.CompleteMultipartUpload", overtake)
    else:
        blob = type(target._blob("a/x"))  # type: ignore[attr-defined]
        compose = blob.compose
        monkeypatch.setattr(blob, "compose", lambda *args: (overtake(), compose(*args)))
    assert copy(source, target) == 3 * PART
    assert moved == [0], "the second copy moved bytes although all parts were stored"
    assert target.get("a/x") == source.get("a/x") and raw_names(target) == {"a/x"}


@pytest.mark.parametrize("kind", ["file", "s3", "gcs"])
def test_what_nobody_goes_on_with_is_tidied(kind: str, bucket_of: Callable[[str], str]) -> None:
    """Tidying removes uploads that have been idle for the given time; a newer upload stays and can be resumed."""
    source, target = open_copy_store(bucket_of("file")), open_copy_store(bucket_of(kind))
    source.put("a/x", bytes_of(11, 6 * PART))

    def stop(done: int, _: int) -> None:
        if done == 2 * PART:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy(source, target, progress=stop)
    left = raw_names(target)
    assert left and list(target.list("")) == []
    target.tidy_uploads(3600)
    assert raw_names(target) == left
    assert copy(source, target, progress=lambda *_: target.tidy_uploads(3600)) <= 4 * PART
    assert target.get("a/x") == source.get("a/x")
    with pytest.raises(KeyboardInterrupt):
        copy(source, target, to="b", progress=stop)
    target.tidy_uploads(0)
    assert raw_names(target) == {"a/x"}


def test_the_same_content_is_not_copied(bucket_of: Callable[[str], str]) -> None:
    """An existing object with the same content is not copied again; one with other content is replaced."""
    source, target = open_copy_store(bucket_of("s3")), open_copy_store(bucket_of("gcs"))
    source.put("a/x", bytes_of(12, 3 * PART))
    target.put("a/x", source.get("a/x"))
    assert copy(source, target) == 0
    target.put("a/x", bytes_of(13, 3 * PART))
    assert copy(source, target) == 3 * PART
    assert target.get("a/x") == source.get("a/x")


@pytest.mark.parametrize("algorithm", ["xxh3_128", "sha256"])
def test_a_checksum_that_is_known_decides(algorithm: str, bucket_of: Callable[[str], str]) -> None:
    """A given checksum decides: another content is an error, and a target that has it is not read from the source."""
    inner, target = open_copy_store(bucket_of("file")), open_copy_store(bucket_of("file"))
    body = bytes_of(14, 2 * PART + 5)
    inner.put("a/x", body)
    good, bad = (sums.checksum(algorithm, [content]) for content in (body, b"other"))
    with pytest.raises(CopyFailed, match=f"a/x: {good} at the target, expected {bad}"):
        copy(inner, target, checksum=bad)
    assert target.stat("a/x") is None
    assert copy(inner, target, checksum=good) == len(body)
    source = Watched(inner)
    assert copy(source, target, checksum=good, name="another") == source.read_bytes == 0


def test_what_cannot_be_copied_is_said(bucket_of: Callable[[str], str]) -> None:
    """A missing object, an object of another size and an invalid part size are errors that name them."""
    source, target = open_copy_store(bucket_of("file")), open_copy_store(bucket_of("file"))
    with pytest.raises(MissingObject, match="no object 'a/x' at file://"):
        copy(source, target)
    source.put("a/x", b"12345")
    with pytest.raises(CopyFailed, match=r"a/x: changed in the source, .*: 5 bytes, expected 6"):
        copy(source, target, size_bytes=6)
    with pytest.raises(ValueError, match="part_bytes=0: must be at least 1"):
        copy(source, target, part_bytes=0)
    assert raw_names(target) == set()


def test_objects_under_a_prefix(bucket_of: Callable[[str], str]) -> None:
    """Exactly the objects below the prefix are copied, progress counts their bytes, and a wrong size is an error."""
    source, target = open_copy_store(bucket_of("file")), open_copy_store(bucket_of("file"))
    bodies = {f"t/{n:02d}": bytes_of(n, 100 * n) for n in range(6)} | {"t/deeper/x": b"[]"}
    for key, body in bodies.items():
        source.put(key, body)
    source.put("t2/other", b"not asked for")
    told: list[tuple[int, int]] = []
    total = sum(map(len, bodies.values()))
    for _ in range(2):
        assert copy_prefix(source, target, "t/", name="t", progress=lambda *now: told.append(now)) == total
    assert {info.key: target.get(info.key) for info in target.list("")} == bodies
    assert told[: len(bodies)] == sorted(told[: len(bodies)]) and told[-1] == (total, total)
    assert copy_prefix(source, target, "none/", name="t") == 0
    with pytest.raises(CopyFailed, match="100 bytes, expected 99"):
        copy_objects(source, target, [Wanted("t/01", 99)], name="t")
