"""The SDK's types of responses are those of the server's views."""

from typing import Any

from tests.api.client_views import FILE, generate, render


def test_the_sdk_has_the_types_of_the_current_views() -> None:
    """The committed module is what the generator writes. If not, run `python -m tests.api.client_views`."""
    assert FILE.read_text() == generate()


def _object(text: str, **fields: Any) -> dict[str, Any]:
    required = [name for name, schema in fields.items() if "default" not in schema]
    return {"type": "object", "description": text, "properties": fields, "required": required}


def _returns(path: str, status: str, name: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return {path: {"get": {"responses": {status: {"content": content}}}}}


def test_a_type_for_each_object_in_a_successful_response() -> None:
    """A subclass has only its own fields, a default makes a field NotRequired, and pages and errors have no type."""
    number, a = {"type": "integer"}, {"$ref": "#/components/schemas/AView"}
    schemas = {
        "BView": _object("A larger one", x=number, y={"const": 1, "default": 1}),
        "AView": _object("One.\n\nWith a second paragraph.", x=number),
        "APage": _object("A page.", items={"type": "array", "items": a}, next_cursor={"type": "string"}),
        "Kind": {"enum": ["new", "old"], "type": "string", "description": "A kind."},
        "CView": _object(
            "Another.",
            kind={"$ref": "#/components/schemas/Kind"},
            by={"type": "object", "additionalProperties": {"anyOf": [a, {"type": "null"}]}, "description": "Null: no"},
        ),
        "Problem": _object("An error.", title={"type": "string"}),
    }
    paths = _returns("/v1/b", "200", "BView") | _returns("/v1/a", "200", "APage") | _returns("/v1/c", "201", "CView")
    paths |= _returns("/v1/wrong", "404", "Problem") | _returns("/healthz", "200", "Problem")
    code = render({"paths": paths, "components": {"schemas": schemas}})
    assert "from typing import Literal, NotRequired, TypedDict\n" in code
    assert code.partition("never changes again.")[2].partition("class")[2] == (
        ' A(TypedDict):\n    """One.\n\n    With a second paragraph.\n    """\n\n    x: int\n\n\n'
        'class B(A):\n    """A larger one."""\n\n    y: NotRequired[Literal[1]]\n\n\n'
        "Kind = Literal['new', 'old']\n" + '"""A kind."""\n\n\n'
        'class C(TypedDict):\n    """Another."""\n\n    kind: Kind\n    by: dict[str, A | None]\n    """None: no."""\n'
    )
