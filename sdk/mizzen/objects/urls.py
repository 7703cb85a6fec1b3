"""Opens a store by its URL."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mizzen.objects.store import ObjectStore


def check_url(url: str) -> None:
    """Check the form of a store's URL; see `open_store`.

    Raises:
        ValueError: the scheme is not supported, or the URL does not name a folder or bucket.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise ValueError(f"bucket URL {url!r}: must be file:///absolute/folder, without a host")
    elif parts.scheme not in ("s3", "gs"):
        raise ValueError(f"bucket URL {url!r}: the scheme must be file, s3 or gs, not {parts.scheme!r}")
    elif not parts.netloc:
        raise ValueError(f"bucket URL {url!r}: must be {parts.scheme}://bucket or {parts.scheme}://bucket/prefix")


def open_store(url: str) -> ObjectStore:
    """Open the store at `file:///absolute/folder`, `s3://bucket/prefix` or `gs://bucket/prefix`.

    Credentials, region and endpoint (`AWS_ENDPOINT_URL`, `STORAGE_EMULATOR_HOST`) are found as by the tools of AWS and
    Google.

    Raises:
        ValueError: the scheme is not supported, or the URL does not name a folder or bucket.
        ModuleNotFoundError: the client library is not installed. The message names the package to install.
    """
    scheme, place, prefix = parts_of(url)
    with naming_the_extra(url):
        if scheme == "file":
            from mizzen.objects.files import FileStore

            return FileStore(Path(place))
        if scheme == "s3":
            from mizzen.objects.s3 import S3Store

            return S3Store(place, prefix)
        from mizzen.objects.gcs import GCSStore

        return GCSStore(place, prefix)


def parts_of(url: str) -> tuple[str, str, str]:
    """Return the scheme of a store's URL, its folder or bucket, and the prefix in the bucket.

    Raises:
        ValueError: see `open_store`.
    """
    check_url(url)
    parts = urlsplit(url)
    path = unquote(parts.path)
    return (parts.scheme, path, "") if parts.scheme == "file" else (parts.scheme, parts.netloc, path.strip("/"))


@contextmanager
def naming_the_extra(url: str) -> Iterator[None]:
    """Name the package to install if a client library is missing; see `open_store`."""
    try:
        yield
    except ModuleNotFoundError as error:
        extra = {"s3": "s3", "gs": "gcs"}[urlsplit(url).scheme]
        message = f"{url}: needs the library {error.name}: install mizzen[{extra}]"
        raise ModuleNotFoundError(message, name=error.name) from error
