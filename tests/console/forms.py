"""What tests read from pages, and put into their addresses."""

import html
import re
from datetime import UTC, datetime, timedelta

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


def minutes_ago(minutes: int) -> str:
    """Returns a time as it stands in the address of the map of the past."""
    return f"{datetime.now(UTC) - timedelta(minutes=minutes):%Y-%m-%dT%H:%MZ}"
