"""The page at /docs: every endpoint with a curl command and an example response."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vitkit.report.html import environment
from vitkit.server.settings import is_host, without_port

MORE = "…"  # stands for further values at the end of a list


@dataclass(frozen=True)
class Example:
    """An example request and response."""

    curl: str  # URL is replaced by the service's base URL
    answer: str
    note: str = ""  # what the fields mean


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
        "One result per image, in the order of the request. An image that cannot be read has "
        '"error" and "code" instead of "top". With reject=0.6, or reject=model for the threshold of the '
        'model, each result has "rejected". '
        'A detector answers with "detections", each with "label", "score" and "box" (left, top, right and '
        'bottom in pixels of the image), one of --task instances also with "mask", and a model for '
        'segmentation with "size" and "classes", each with "label", its "share" of the '
        'pixels, and "mask" as compressed run lengths of COCO.',
    ),
    "/v1/embed": Example(
        "curl -F files=@cat.jpg 'URL/v1/embed'",
        """{
  "model": "photos",
  "results": [
    {"image": "cat.jpg", "features": [0.0213, -1.2087, 0.5541, …]}
  ]
}""",
        "A vector of the model's width, for search, clustering or a classifier of your own.",
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
        '"rollout" and "class_map" hold a number from 0 to 1 for each patch of the grid, in row-major order. '
        '"maps" is the attention of every head as base64-encoded bytes, (layers, heads, rows, columns).',
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
  "reject_below": null,
  "threshold": null,
  "preprocessing": {"resize": "crop", "crop": 0.875},
  "engine": "torch",
  "device": "cpu",
  "precision": "fp32",
  "origin": {"format": "vitkit", "source": "model.safetensors", "licence": "", "sha256": "5d41c0…"},
  "attention": true,
  "formats": [".jpg", ".jpeg", ".png", …],
  "limits": {"bytes": 10000000, "pixels": 20000000, "images": 32, "seconds": 30.0, "queue": 256}
}""",
        '"covered" is the part of "image_size" that is made of whole patches, which the maps refer to. '
        '"revision" is 1 for the first model file and increases with each reload.',
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
    """An example response as JSON, without the ellipses at the end of lists."""
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
    "error": {"type": "string", "description": "a human-readable message: what is wrong and what to do"},
    "code": {"type": "string", "description": "a stable code, area.reason, for programs"},
    "request": {"type": "string", "description": "the request id, which is also in the log"}}}}}  # fmt: skip
ERRORS = {
    400: "the Host header is not one of the service's names (--allow-host)",
    401: "the token is missing or wrong",
    403: "the request comes from a web page of another origin",
    413: "the request is too large",
    415: "the body is not an image, a form or JSON",
    422: "an image or a parameter is invalid; the error message says why",
    503: "the service is overloaded: try again after Retry-After seconds",
}
IMAGES: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": ONE | {"multipart/form-data": FORM, "application/json": BASE64},
    }
}


def openapi_extras(path: str) -> dict[str, Any]:
    """The request body, example and error responses of an image endpoint, for the OpenAPI document."""
    example = {"application/json": {"example": value_of(EXAMPLES[path].answer)}}
    success = {"description": "one result per image", "content": example}
    errors = {status: {"description": text, "content": ERROR_SCHEMA} for status, text in ERRORS.items()}
    return {"openapi_extra": IMAGES, "responses": {200: success} | errors}


def base_url(headers: Mapping[str, str]) -> str:
    """The service's URL as the client sees it; an invalid host name must not end up in a shell command."""
    host = headers.get("host", "")
    scheme = "https" if headers.get("x-forwarded-proto") == "https" else "http"
    return f"{scheme}://{host}" if is_host(without_port(host)) else "http://127.0.0.1:8000"


def page(document: dict[str, Any], url: str, token_paths: tuple[str, ...] = ()) -> str:
    """An OpenAPI document as HTML, for a service at `url` that requires a token under `token_paths`."""
    info = document["info"]
    calls = [
        call(method.upper(), path, operation, url, token_paths)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    return environment("vitkit.server").get_template("docs.html").render(
        title=f"{info['title']} {info['version']}", description=info["description"], token=bool(token_paths),
        calls=calls, sending=[(way, command(curl, url, token_paths)) for way, curl in SENDING.items()],
        error=ERROR, errors=[(str(status), meaning) for status, meaning in ERRORS.items()],
    )  # fmt: skip


def call(
    method: str, path: str, operation: dict[str, Any], url: str, token_paths: tuple[str, ...]
) -> dict[str, Any]:
    """One endpoint for the template: its summary, parameters, example request and response."""
    example = EXAMPLES[path]
    parameters = [
        (parameter["name"], parameter["description"] + limits(parameter["schema"]))
        for parameter in operation.get("parameters", [])
    ]
    return {
        "method": method, "path": path, "anchor": path.strip("/").replace("/", "-"),
        "summary": operation["summary"], "curl": command(example.curl, url, token_paths),
        "answer": example.answer, "note": example.note, "parameters": parameters,
    }  # fmt: skip


def limits(schema: dict[str, Any]) -> str:
    if "maximum" not in schema:
        return ""
    return f", {schema['minimum']} to {schema['maximum']}; default {schema['default']}"


def command(line: str, url: str, token_paths: tuple[str, ...]) -> str:
    """A shell command with the service's URL, and with the token if the endpoint requires one."""
    if any(f"URL{path}" in line for path in token_paths):
        line = line.replace("curl ", 'curl -H "Authorization: Bearer $VITKIT_TOKEN" ')
    return line.replace("URL", url)
