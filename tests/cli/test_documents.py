"""Parsing of documents by the client, which must agree with the API."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.documents.syntax import Malformed, load_yaml
from mizzen_client import DocumentError, read_documents
from mizzen_client.documents import parse_documents

PLAIN = st.sampled_from(
    [
        *["010", "12:30:00", "2024-01-01", "NO", "nO", "Yes", "off", "~", "", "null", "NULL", ".5", "1.", "1e5"],
        *["+3", "-0", "0x1f", "0o17", "1_000", ".inf", ".nan", "'1'", '"yes"', "=", "0.1.2", "1:30", "true", "a: b"],
    ]
)


@given(st.one_of(PLAIN, st.text("0123456789+-.eE:_xno ~", max_size=6)))
def test_a_scalar_means_to_the_client_what_it_means_to_the_api(text: str) -> None:
    """A plain scalar that the API accepts has the same value in the client, both as a value and as a key."""
    for document in (f"a: [{text}]", f"a: {text}", f"{text}: 1"):
        try:
            theirs = load_yaml(document.encode())
        except Malformed:
            continue
        if isinstance(theirs, dict):
            try:
                [ours] = parse_documents(document, "x", Path())
            except DocumentError:
                assert "inf" in repr(dict(theirs)), "the client rejected a value that JSON can represent"
                continue
            assert repr(ours.body) == repr(dict(theirs))


def test_a_file_may_hold_several_documents(tmp_path: Path) -> None:
    """Each document has its file and its number, and its workdir is relative to the file's folder."""
    file = tmp_path / "two.yaml"
    file.write_text("name: a\nworkdir: ./src\n---\nname: b\nworkdir: " + "0" * 64 + "\n---\n")
    one, two = read_documents(file)
    assert (one.source, one.body, one.workdir) == (str(file), {"name": "a"}, tmp_path / "src")
    assert (two.source, two.body["workdir"], two.workdir) == (f"{file}#2", "0" * 64, None)


def test_json_is_read_with_tabs_too(tmp_path: Path) -> None:
    """JSON with tabs, which YAML does not allow, can be parsed."""
    file = tmp_path / "a.json"
    file.write_text('{\n\t"name": "a"\n}')
    assert read_documents(file)[0].body == {"name": "a"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", "x:2:1: duplicate key 'a'"),
        ('{"a": 1, "a": 2}', "x: duplicate key 'a'"),
        ("a: [1\n", "x:2:1: "),
        ("[1, 2]", "x: a document must be a mapping of keys to values, got a list"),
        ("", "x: contains no document"),
        ("a: 1e400", "x: has a value that JSON cannot represent"),
        ("a: &b [*b]", "x: has a value that JSON cannot represent"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_with_its_place(text: str, message: str) -> None:
    """Invalid syntax, duplicate keys and values that JSON cannot represent are errors that start with the file name."""
    with pytest.raises(DocumentError) as caught:
        parse_documents(text, "x", Path())
    assert str(caught.value).startswith(message)
