"""The page at /docs: every call with a curl line and its answer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vitkit.report.html import environment
from vitkit.server.settings import is_host, without_port

MORE = "…"  # at the end of a list: more values follow


@dataclass(frozen=True)
class Example:
    """A request and the form of its answer."""

    curl: str  # URL stands for the address of the service
    answer: str
    note: str = ""  # what the fields are


SENDING = {
    "One or several files, up to 32": "curl -F files=@cat.jpg -F files=@dog.jpg 'URL/v1/predict'",
    "One image as the body": ("curl -H 'Content-Type: image/jpeg' --data-binary @cat.jpg 'URL/v1/predict'"),
    "JSON with base64": (
        """(printf '{"images": [{"name": "cat.jpg", "data": "'; base64 < cat.jpg | tr -d '\\n'; """
        """printf '"}]}') | curl -H 'Content-Type: application/json' --data-binary @- 'URL/v1/predict'"""
    ),
}
ERROR = """{
  "error": "not an image: its first bytes are those of no known format",
  "code": "image.unreadable",
  "request": "8a3c733e7b4115ea"
}"""
EXAMPLES = {
    "/v1/predict": Example(
        "curl -F files=@cat.jpg 'URL/v1/predict?top=3'",
        """{
  "model": "photos",
  "results": [
    {
      "image": "cat.jpg",
      "top": [
        {"label": "tabby cat", "probability": 0.8312},
        {"label": "tiger cat", "probability": 0.1127},
        {"label": "lynx", "probability": 0.0214}
      ]
    }
  ]
}""",
        "One result for each image, in the order in which they were sent. An image that cannot be read has "
        '"error" and "code" instead of "top".',
    ),
    "/v1/embed": Example(
        "curl -F files=@cat.jpg 'URL/v1/embed'",
        """{
  "model": "photos",
  "results": [
    {"image": "cat.jpg", "features": [0.0213, -1.2087, 0.5541, …]}
  ]
}""",
        "A vector as long as the model is wide, for search, clustering or a classifier of your own.",
    ),
    "/v1/attention": Example(
        "curl -F files=@cat.jpg 'URL/v1/attention'",
        """{
  "grid": [14, 14],
  "layers": 12,
  "heads": 3,
  "rollout": [0.0312, 0.0871, …],
  "maps": "AAQSHzNB…",
  "class_map": [0.0, 0.2154, …],
  "image_size": [224, 224],
  "top": [{"label": "tabby cat", "probability": 0.8312}, …]
}""",
        '"rollout" and "class_map" are numbers from 0 to 1, one for each patch of the grid, row after row. '
        '"maps" is the attention of each head as base64 of bytes, (layers, heads, rows, columns).',
    ),
    "/v1/model": Example(
        "curl 'URL/v1/model'",
        """{
  "name": "photos",
  "revision": 1,
  "classes": 37,
  "labels": ["Abyssinian", "Bengal", …],
  "image_size": [224, 224],
  "covered": [224, 224],
  "parameters": 5531749,
  "task": "classify",
  "multilabel": false,
  "preprocessing": {"resize": "crop", "crop": 0.875},
  "engine": "torch",
  "device": "cpu",
  "precision": "fp32",
  "origin": {"format": "vitkit", "source": "model.safetensors", "licence": "", "sha256": "5d41c0…"},
  "attention": true,
  "formats": [".jpg", ".jpeg", ".png", …],
  "limits": {"bytes": 10000000, "pixels": 20000000, "images": 32, "seconds": 30.0, "queue": 256}
}""",
        '"covered" is the part of "image_size" that consists of whole patches, to which the maps belong. '
        '"revision" is 1 for the first model file and grows with each that is loaded later.',
    ),
    "/healthz": Example("curl 'URL/healthz'", '{"status": "ok"}'),
    "/readyz": Example("curl 'URL/readyz'", '{"status": "ready"}', "503 while the service is stopping."),
    "/metrics": Example(
        "curl 'URL/metrics'",
        """vitkit_requests_total{path="/v1/predict",status="200"} 12.0
vitkit_images_total{outcome="answered"} 15.0
vitkit_waiting_images 0.0
…""",
    ),
}


def value_of(answer: str) -> Any:
    """An example as JSON, without the ellipses at the end of lists."""
    return json.loads(answer.replace(f", {MORE}", ""))


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
    return environment("vitkit.server").get_template("docs.html").render(
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
