"""References of images: what they mean, as Docker reads them."""

import pytest

from domain.images import parse_image

DIGEST = f"sha256:{'0' * 64}"


@pytest.mark.parametrize(
    ("text", "registry", "repository", "tag"),
    [
        ("ubuntu", "docker.io", "library/ubuntu", "latest"),
        ("lab/train:1.2", "docker.io", "lab/train", "1.2"),
        ("ghcr.io/lab/train", "ghcr.io", "lab/train", "latest"),
        ("localhost/train", "localhost", "train", "latest"),
        ("127.0.0.1:5000/a/b_c/d-e:X_1", "127.0.0.1:5000", "a/b_c/d-e", "X_1"),
    ],
)
def test_parts(text: str, registry: str, repository: str, tag: str) -> None:
    """The first part of a name is a host if it has a dot or a port; a digest replaces the tag."""
    image = parse_image(text)
    assert (image.registry, image.repository, image.tag, image.digest) == (registry, repository, tag, None)
    assert parse_image(f"{text}@{DIGEST}").digest == DIGEST
    assert parse_image(image.pinned(DIGEST)).pinned(DIGEST) == image.pinned(DIGEST)


@pytest.mark.parametrize("text", ["", "A", "a b", "a/", "/a", "a:", "a@sha256:0", "../a", "a//b", "a" * 600, "a\n"])
def test_what_is_no_reference(text: str) -> None:
    """The error names the reference and the form."""
    with pytest.raises(ValueError, match="must be"):
        parse_image(text)
