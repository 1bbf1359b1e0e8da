"""The page at /docs: the endpoints out of the OpenAPI document, without a script or a foreign address."""

import json
from html import escape
from typing import Any

ONE = {kind: {"schema": {"type": "string", "format": "binary"}}
       for kind in ("image/jpeg", "image/png", "image/webp", "application/octet-stream")}  # fmt: skip
FILES = {"type": "array", "maxItems": 32, "items": {"type": "string", "format": "binary"}}
FORM = {"schema": {"type": "object", "properties": {"files": FILES}}}
ENTRY = {"type": "object", "required": ["data"], "properties": {
    "name": {"type": "string"}, "data": {"type": "string", "format": "byte"}}}  # fmt: skip
BASE64 = {"schema": {"type": "object", "required": ["images"], "properties": {
    "images": {"type": "array", "minItems": 1, "maxItems": 32, "items": ENTRY}}}}  # fmt: skip
ERROR = {"application/json": {"schema": {"type": "object", "properties": {
    "error": {"type": "string"}, "request": {"type": "string"}}}}}  # fmt: skip
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": ERROR}
    for status, text in {
        401: "no token, or a wrong one",
        403: "asked from a page of another origin",
        413: "too large",
        415: "neither an image, nor a form, nor JSON",
        422: "an image or a parameter that cannot be used, and why",
        503: "too much is waiting: try again after Retry-After seconds",
    }.items()
}
BODIES: dict[str, Any] = {
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": ONE | {"multipart/form-data": FORM, "application/json": BASE64},
        }
    },
    "responses": ERRORS,
}
ATTENTION = BODIES


def page(document: dict[str, Any]) -> str:
    """HTML of an OpenAPI document."""
    info = document["info"]
    parts = [
        endpoint(method.upper(), path, facts)
        for path, methods in document["paths"].items()
        for method, facts in methods.items()
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(info["title"])}</title>'
        '<meta name="viewport" content="width=device-width"><link rel="stylesheet" href="/static/docs.css">'
        f"</head><body><h1>{escape(info['title'])} {escape(info['version'])}</h1>"
        f'<p>{escape(info["description"])} For programs: <a href="/openapi.json">openapi.json</a>.'
        f"</p>{''.join(parts)}</body></html>"
    )


def endpoint(method: str, path: str, facts: dict[str, Any]) -> str:
    rows = [
        row(f"?{one['name']}=", one.get("description", one["schema"].get("description", "")))
        for one in facts.get("parameters", [])
    ]
    bodies = facts.get("requestBody", {}).get("content", {})
    for kind, form in bodies.items():
        rows.append(row(kind, "" if kind in ONE else json.dumps(form["schema"])))
    rows += [row(status, one["description"]) for status, one in facts["responses"].items()]
    head = f"<h2><code>{escape(method)} {escape(path)}</code></h2><p>{escape(facts.get('summary', ''))}</p>"
    return f"<section>{head}<table>{''.join(rows)}</table></section>"


def row(name: str, text: str) -> str:
    return f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>"
