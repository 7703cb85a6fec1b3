"""What tests read from pages."""

import html
import re

import httpx


def csrf_of(page: httpx.Response) -> str:
    """Returns the token that the forms of a page carry."""
    found = re.search(r'name="csrf" value="([0-9a-f]+)"', page.text)
    assert found is not None, page.text
    return found[1]


def document_of(page: httpx.Response) -> str:
    """Returns the document in a page's form, as the browser shows it."""
    found = re.search(r"<textarea[^>]*>\n(.*?)</textarea>", page.text, re.DOTALL)
    assert found is not None, page.text
    return html.unescape(found[1])
