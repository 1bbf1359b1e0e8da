"""A curl command and its answer for every call, as /docs shows them; a test sends them to a real service."""

import json
from dataclasses import dataclass
from typing import Any

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
