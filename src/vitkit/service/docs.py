"""The page at /docs: every call with a curl line and an answer, without a script or a foreign address."""

from collections.abc import Mapping
from html import escape
from typing import Any

from vitkit.service.examples import ERROR, EXAMPLES, SENDING, value_of
from vitkit.service.settings import is_host, without_port

ONE = {kind: {"schema": {"type": "string", "format": "binary"}}
       for kind in ("image/jpeg", "image/png", "image/webp", "application/octet-stream")}  # fmt: skip
FILES = {"type": "array", "maxItems": 32, "items": {"type": "string", "format": "binary"}}
FORM = {"schema": {"type": "object", "properties": {"files": FILES}}}
ENTRY = {"type": "object", "required": ["data"], "properties": {
    "name": {"type": "string"}, "data": {"type": "string", "format": "byte"}}}  # fmt: skip
BASE64 = {"schema": {"type": "object", "required": ["images"], "properties": {
    "images": {"type": "array", "minItems": 1, "maxItems": 32, "items": ENTRY}}}}  # fmt: skip
ERROR_SCHEMA = {"application/json": {"schema": {"type": "object", "properties": {
    "error": {"type": "string", "description": "what is wrong and what to do, for people"},
    "code": {"type": "string", "description": "area.reason, stable, for programs"},
    "request": {"type": "string", "description": "the id of the request, in the log too"}}}}}  # fmt: skip
ERRORS = {
    400: "asked by a name that the service does not know (--allow-host)",
    401: "no token, or a wrong one",
    403: "asked from a page of another origin",
    413: "too large",
    415: "neither an image, nor a form, nor JSON",
    422: "an image or a parameter that cannot be used, and why",
    503: "too much is waiting: try again after Retry-After seconds",
}
IMAGES: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": ONE | {"multipart/form-data": FORM, "application/json": BASE64},
    }
}


def facts(path: str) -> dict[str, Any]:
    """What the OpenAPI document says of a call that takes images, beside its summary and its parameters."""
    example = {"application/json": {"example": value_of(EXAMPLES[path].answer)}}
    answer = {"description": "what was found", "content": example}
    errors = {status: {"description": text, "content": ERROR_SCHEMA} for status, text in ERRORS.items()}
    return {"openapi_extra": IMAGES, "responses": {200: answer} | errors}


def address(headers: Mapping[str, str]) -> str:
    """By which the service was asked; what is no name of a host is not repeated in lines for a shell."""
    host = headers.get("host", "")
    scheme = "https" if headers.get("x-forwarded-proto") == "https" else "http"
    return f"{scheme}://{host}" if is_host(without_port(host)) else "http://127.0.0.1:8000"


def page(document: dict[str, Any], url: str, secret: tuple[str, ...] = ()) -> str:
    """HTML of an OpenAPI document, for a service at `url` that wants a token below the paths `secret`."""
    info = document["info"]
    calls = [
        (method.upper(), path, said)
        for path, methods in document["paths"].items()
        for method, said in methods.items()
    ]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<link rel="icon" href="static/icon.svg" type="image/svg+xml">'
        '<link rel="stylesheet" href="static/colours.css">'
        '<link rel="stylesheet" href="static/docs.css"></head>'
        f"<body><header><h1>{title}</h1><p>{escape(info['description'])} "
        '<a href="./">Try it in the browser</a>, or read <a href="openapi.json">openapi.json</a> with a '
        f"program.</p>{token_note() if secret else ''}{contents(calls)}</header>"
        f"<main>{''.join(call(*one, url, secret) for one in calls)}{sending(url, secret)}{errors()}</main>"
        "</body></html>"
    )


def contents(calls: list[tuple[str, str, dict[str, Any]]]) -> str:
    rows = [
        row(f'<a href="#{anchor(path)}">{method} {escape(path)}</a>', escape(said["summary"]))
        for method, path, said in calls
    ]
    return f"<nav><table>{''.join(rows)}</table></nav>"


def token_note() -> str:
    return (
        "<p>This service asks for a token. Before you use the lines below:</p>"
        "<pre><code>export VITKIT_TOKEN=...</code></pre>"
    )


def call(method: str, path: str, said: dict[str, Any], url: str, secret: tuple[str, ...]) -> str:
    """One call: what it does, its parameters, a request and the answer."""
    example = EXAMPLES[path]
    parameters = [
        row(f"<code>?{one['name']}=</code>", escape(one["description"]) + limits(one["schema"]))
        for one in said.get("parameters", [])
    ]
    table = f"<table>{''.join(parameters)}</table>" if parameters else ""
    note = f"<p>{escape(example.note)}</p>" if example.note else ""
    return (
        f'<section id="{anchor(path)}"><h2><code>{method} {escape(path)}</code></h2>'
        f"<p>{escape(said['summary'])}.</p>{command(example.curl, url, secret)}"
        f'<pre class="answer"><code>{escape(example.answer)}</code></pre>{note}{table}</section>'
    )


def limits(schema: dict[str, Any]) -> str:
    if "maximum" not in schema:
        return ""
    return f", {schema['minimum']} to {schema['maximum']}; {schema['default']} if not given"


def sending(url: str, secret: tuple[str, ...]) -> str:
    """The ways in which images are sent."""
    ways = "".join(f"<h3>{escape(way)}</h3>{command(curl, url, secret)}" for way, curl in SENDING.items())
    return (
        '<section id="images"><h2>Sending images</h2><p>The calls that take images take them in three ways. '
        f"What kind of image it is stands in the file, not in its name or type.</p>{ways}</section>"
    )


def errors() -> str:
    """All errors have one form."""
    rows = "".join(row(str(status), escape(text)) for status, text in ERRORS.items())
    return (
        f'<section id="errors"><h2>Errors</h2><pre class="error"><code>{escape(ERROR)}</code></pre>'
        "<p>Texts may change from version to version; the status and the code stay, for programs to go by. "
        "The same id of the request is in the header X-Request-Id and in the log of the service.</p>"
        f"<table>{rows}</table></section>"
    )


def command(line: str, url: str, secret: tuple[str, ...]) -> str:
    """A line for a shell, with the address of the service and with the token where one is needed."""
    if any(f"URL{path}" in line for path in secret):
        line = line.replace("curl ", 'curl -H "Authorization: Bearer $VITKIT_TOKEN" ')
    return f'<pre class="command"><code>{escape(line.replace("URL", url))}</code></pre>'


def anchor(path: str) -> str:
    return path.strip("/").replace("/", "-")


def row(name: str, text: str) -> str:
    """Of two cells, which are HTML already."""
    return f"<tr><th>{name}</th><td>{text}</td></tr>"
