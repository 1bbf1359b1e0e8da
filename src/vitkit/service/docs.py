"""The page at /docs: every call with a curl line and an answer, without a script or a foreign address."""

from collections.abc import Mapping
from typing import Any

from vitkit.report.html import environment
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
    400: "the request names a host that the service does not know (--allow-host)",
    401: "the token is missing or wrong",
    403: "the request comes from a page of another origin",
    413: "the request is too large",
    415: "the body is neither an image, nor a form, nor JSON",
    422: "an image or a parameter cannot be used; the error says why",
    503: "too many requests are waiting: try again after Retry-After seconds",
}
IMAGES: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": ONE | {"multipart/form-data": FORM, "application/json": BASE64},
    }
}


def facts(path: str) -> dict[str, Any]:
    """What the OpenAPI document has for a call that takes images, besides its summary and parameters."""
    example = {"application/json": {"example": value_of(EXAMPLES[path].answer)}}
    answer = {"description": "one result for each image", "content": example}
    errors = {status: {"description": words, "content": ERROR_SCHEMA} for status, words in ERRORS.items()}
    return {"openapi_extra": IMAGES, "responses": {200: answer} | errors}


def address(headers: Mapping[str, str]) -> str:
    """The address of the service as the client used it; what is no host name never gets into a shell line."""
    host = headers.get("host", "")
    scheme = "https" if headers.get("x-forwarded-proto") == "https" else "http"
    return f"{scheme}://{host}" if is_host(without_port(host)) else "http://127.0.0.1:8000"


def page(document: dict[str, Any], url: str, secret: tuple[str, ...] = ()) -> str:
    """HTML of an OpenAPI document, for a service at `url` that wants a token below the paths `secret`."""
    info = document["info"]
    calls = [
        call(method.upper(), path, operation, url, secret)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    return environment("vitkit.service").get_template("docs.html").render(
        title=f"{info['title']} {info['version']}", description=info["description"], token=bool(secret),
        calls=calls, sending=[(way, command(curl, url, secret)) for way, curl in SENDING.items()],
        error=ERROR, errors=[(str(status), meaning) for status, meaning in ERRORS.items()],
    )  # fmt: skip


def call(
    method: str, path: str, operation: dict[str, Any], url: str, secret: tuple[str, ...]
) -> dict[str, Any]:
    """One call: what it does, its parameters, a request and the answer."""
    example = EXAMPLES[path]
    parameters = [
        (one["name"], one["description"] + limits(one["schema"])) for one in operation.get("parameters", [])
    ]
    return {
        "method": method, "path": path, "anchor": path.strip("/").replace("/", "-"),
        "summary": operation["summary"], "curl": command(example.curl, url, secret),
        "answer": example.answer, "note": example.note, "parameters": parameters,
    }  # fmt: skip


def limits(schema: dict[str, Any]) -> str:
    if "maximum" not in schema:
        return ""
    return f", {schema['minimum']} to {schema['maximum']}; {schema['default']} if not given"


def command(line: str, url: str, secret: tuple[str, ...]) -> str:
    """A line for a shell, with the address of the service and with the token where one is needed."""
    if any(f"URL{path}" in line for path in secret):
        line = line.replace("curl ", 'curl -H "Authorization: Bearer $VITKIT_TOKEN" ')
    return line.replace("URL", url)
