"""What tests read from pages."""

import re

import httpx


def csrf_of(page: httpx.Response) -> str:
    """Returns the token that the forms of a page carry."""
    found = re.search(r'name="csrf" value="([0-9a-f]+)"', page.text)
    assert found is not None, page.text
    return found[1]
