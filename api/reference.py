"""`/docs`: the OpenAPI description as an HTML page that can send requests, without external scripts or styles."""

import json
from collections.abc import Iterator
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse

from api.routing import Router

router = Router()
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)
_SCRIPT = Path(__file__).with_name("try_out.js")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
details { border-top: 1px solid #ddd; padding: .4rem 0 } summary { cursor: pointer }
code, b.method { font-family: ui-monospace, monospace; font-size: .95em } b.method { display: inline-block; width: 5em }
form { margin: .5rem 0 } form label { display: block; margin: .2rem 0 } pre { overflow: auto; background: #f4f4f4 }
form textarea { width: 100%; height: 8rem; font-family: ui-monospace, monospace } pre { max-height: 30rem }
table { border-collapse: collapse; margin: .5rem 0 } td { padding: .1rem 1rem .1rem 0; vertical-align: top }
"""


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """Returns an HTML page of all operations with their parameters, bodies and responses."""
    app: FastAPI = request.app
    headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}
    return HTMLResponse(_page(app), headers=headers)


@router.get("/openapi.json", include_in_schema=False)
async def openapi_document(request: Request) -> Response:
    """Returns the OpenAPI description. It needs no key, so it is not serialised again for each request."""
    return Response(_document(request.app), media_type="application/json")


@router.get("/docs/try_out.js", include_in_schema=False)
async def try_out() -> Response:
    """Returns the script of `/docs`."""
    return Response(_script(), media_type="text/javascript", headers={"X-Content-Type-Options": "nosniff"})


@lru_cache(maxsize=1)
def _script() -> bytes:
    return _SCRIPT.read_bytes()


@lru_cache(maxsize=1)
def _document(app: FastAPI) -> bytes:
    return json.dumps(app.openapi(), ensure_ascii=False, separators=(",", ":")).encode()


@lru_cache(maxsize=1)
def _page(app: FastAPI) -> str:
    described = app.openapi()
    lines = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>mizzen API</title><style>{_STYLE}</style>",
        f"<h1>mizzen API {escape(app.version)}</h1>",
        f"<p style='white-space: pre-line'>{escape(described['info']['description'].strip())}</p>",
        "<p>For programs: <a href=openapi.json>openapi.json</a>.</p>",
        "<script src=docs/try_out.js defer></script>",
    ]
    for tag in described["tags"]:
        lines.append(f"<h2>{escape(tag['name'])}</h2><p>{escape(tag['description'])}</p>")
        for path, methods in described["paths"].items():
            for method, operation in methods.items():
                if tag["name"] in operation["tags"]:
                    lines += _operation(method, path, operation)
    lines.append("<h2>Schemas</h2>")
    for name, schema in sorted(described["components"]["schemas"].items()):
        lines.append(f"<details id='{escape(name)}'><summary><code>{escape(name)}</code></summary>")
        lines.append(f"<p>{escape(schema.get('description', ''))}</p>")
        rows = [
            (key, _type(value), value.get("description", "")) for key, value in schema.get("properties", {}).items()
        ]
        lines += [*_table(rows), "</details>"]
    return "\n".join(lines)


def _operation(method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"<details data-method='{method}' data-path='{escape(path)}'><summary>"
    yield f"<b class=method>{method.upper()}</b> <code>{escape(path)}</code> "
    yield f"{escape(operation['summary'])}</summary><p>{escape(operation['description'])}</p>"
    scopes = [scope for need in operation.get("security", ()) for names in need.values() for scope in names]
    if scopes:
        yield f"<p>Requires the role {escape(', '.join(scopes))}.</p>"
    given = operation.get("parameters", ())
    yield from _table((f"{p['name']} ({p['in']})", _type(p.get("schema", {})), p.get("description", "")) for p in given)
    for media, body in operation.get("requestBody", {}).get("content", {}).items():
        yield f"<p>Body: <code>{escape(media)}</code>, {_type(body.get('schema', {}))}</p>"
    yield from _table(
        (
            status,
            ", ".join(_type(c.get("schema", {})) for c in answer.get("content", {}).values()),
            answer["description"],
        )
        for status, answer in operation["responses"].items()
    )
    yield "</details>"


def _table(rows: Any) -> Iterator[str]:
    """Yields an HTML table. A row is a name, a type (already HTML) and a description."""
    yield "<table>"
    for name, kind, text in rows:
        yield f"<tr><td><code>{escape(name)}</code><td>{kind}<td>{escape(text)}"
    yield "</table>"


def _type(schema: dict[str, Any]) -> str:
    """Returns a schema as one line of HTML, with links to named schemas."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f"<a href='#{name}'>{name}</a>"
    if "anyOf" in schema:
        return " or ".join(_type(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(escape(str(value)) for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return escape(str(schema.get("type", "any")))
