"""Opens a store by its URL."""

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
    check_url(url)
    parts = urlsplit(url)
    if parts.scheme == "file":
        from mizzen.objects.files import FileStore

        return FileStore(Path(unquote(parts.path)))
    prefix = unquote(parts.path).strip("/")
    try:
        if parts.scheme == "s3":
            from mizzen.objects.s3 import S3Store

            return S3Store(parts.netloc, prefix)
        from mizzen.objects.gcs import GCSStore

        return GCSStore(parts.netloc, prefix)
    except ModuleNotFoundError as error:
        extra = {"s3": "s3", "gs": "gcs"}[parts.scheme]
        message = f"{url}: needs the library {error.name}: install mizzen[{extra}]"
        raise ModuleNotFoundError(message, name=error.name) from error
