"""The FastAPI application: endpoints, pages and error handlers."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.staticfiles import StaticFiles

import vitkit
from vitkit.data.decode import BadImage
from vitkit.errors import Error
from vitkit.inference.predict import answers_of
from vitkit.inference.rejection import rejection_threshold
from vitkit.inspection.subject import class_number
from vitkit.report.palette import CSS
from vitkit.server.admission import AdmissionControl, Output
from vitkit.server.docs import base_url, openapi_extras, page
from vitkit.server.guard import TOKEN_PATHS, AsciiJSONResponse, Guard, RequestError, error_response, to_json
from vitkit.server.inputs import Images, read_images
from vitkit.server.served_model import Served, attention_objection
from vitkit.server.settings import Settings
from vitkit.tasks.task import Sizes, task_of

WEB = Path(__file__).parent / "web"
BYTES_PER_VALUE = 30  # of a response: a number, or a label with its probability
Top = Annotated[int, Query(ge=1, le=1000, description="the number of labels per image")]
Target = Annotated[
    str | None, Query(max_length=500, description="a label or class number; the most likely by default")
]
Reject = Annotated[
    str | None,
    Query(
        max_length=50,
        description="reject an image if the probability of its likeliest label is below this number, or with "
        "'model' below the threshold of the model; each result then has the field rejected. For a detector: "
        "the minimum score of a box",
    ),
]
ToResult = Callable[[Any], dict[str, Any]]  # the output for one image -> its JSON fields


def make_app(admission: AdmissionControl) -> Guard:
    """The application, wrapped in the middleware that guards every request."""
    app = FastAPI(
        title="vitkit serve", version=vitkit.__version__, docs_url=None, redoc_url=None,
        description="Labels, features and attention maps of images, from one model.",
    )  # fmt: skip
    add_error_handlers(app)
    add_inference(app, admission)
    add_status(app, admission)
    add_pages(app, admission.settings)
    return Guard(app, admission.settings, admission.metrics, lambda: admission.stopping)


def add_inference(app: FastAPI, admission: AdmissionControl) -> None:
    """The endpoints that run the model on images."""

    @app.post(
        "/v1/predict",
        summary="Labels of images, or the boxes or masks in them",
        **openapi_extras("/v1/predict"),
    )
    async def predict(request: Request, top: Top = 5, reject: Reject = None) -> Response:
        served = admission.served  # a reload during the request does not change its model
        validate(task_of(served.model).check_head, served.model)
        below = validate(rejection_threshold, served.model, reject)

        def to_result(output: Output) -> dict[str, Any]:
            return answer(served, output.values[None], top, below, [output.size])

        most = sys.maxsize if task_of(served.model).targets else top
        return await respond(admission, request, "predict", served, to_result, most)

    @app.post("/v1/embed", summary="Feature vectors of images, the input of the head",
              **openapi_extras("/v1/embed"))  # fmt: skip
    async def embed(request: Request) -> Response:
        served = admission.served

        def to_result(features: Any) -> dict[str, Any]:
            return {"features": check_finite(features).tolist()}

        return await respond(admission, request, "embed", served, to_result)

    @app.post("/v1/attention", summary="Attention maps of one image", **openapi_extras("/v1/attention"))
    async def attention(request: Request, target: Target = None) -> Response:
        served = admission.served
        if objection := attention_objection(served.model):
            raise RequestError(422, objection, code="inspection.unsupported")
        number = None if target is None else validate(class_number, served.model, target, False)
        admission.check_capacity("attention")
        with admission.track_bytes() as add_bytes:
            images, _ = await read_images(request, admission.settings, add_bytes, admission.offload)
            if len(images) != 1:
                raise RequestError(422, f"/v1/attention takes one image per request, not {len(images)}")
            (result,) = await admission.infer(request, "attention", served, images, number)
        if isinstance(result, BadImage):
            raise RequestError(422, str(result), code=result.code)
        maps, logits = result
        labels = {"top": []} if logits is None else answer(served, logits, 5)
        return AsciiJSONResponse(await admission.offload(len(maps["maps"]), to_json, maps | labels))


async def respond(
    admission: AdmissionControl, request: Request, kind: str, served: Served, to_result: ToResult,
    max_values: int = sys.maxsize,
) -> Response:  # fmt: skip
    """Read the images of a request, run the model, and respond with up to `max_values` values per image."""
    admission.check_capacity(kind)
    with admission.track_bytes() as add_bytes:
        images, is_raw = await read_images(request, admission.settings, add_bytes, admission.offload)
        outputs = await admission.infer(request, kind, served, images)
    if is_raw and isinstance(outputs[0], BadImage):
        raise RequestError(422, str(outputs[0]), code=outputs[0].code)
    values = sum(min(max_values, output.numel()) for output in outputs if not isinstance(output, BadImage))
    size = BYTES_PER_VALUE * values
    return AsciiJSONResponse(
        await admission.offload(size, encode_results, served.name, images, outputs, to_result)
    )


def encode_results(model: str, images: Images, outputs: list[Any], to_result: ToResult) -> bytes:
    """The response as JSON, encoded image by image since json.dumps holds the GIL."""
    results = []
    for (name, _), output in zip(images, outputs, strict=True):
        result = image_error(output) if isinstance(output, BadImage) else to_result(output)
        results.append(to_json({"image": name} | result))
    return b'{"model":%b,"results":[%b]}' % (to_json(model), b",".join(results))


def answer(
    served: Served, values: Any, top: int, below: float | None = None, sizes: Sizes = ()
) -> dict[str, Any]:
    """The prediction for one image, as the model's task serialises it; below: the threshold of rejection."""
    return answers_of(served.model, check_finite(values), top, below, sizes)[0].brief()


def image_error(error: BadImage) -> dict[str, str]:
    return {"error": str(error), "code": error.code}


def check_finite(values: Any) -> Any:
    if not values.isfinite().all():
        raise RequestError(422, "the model's output for this image is not finite", code="engine.failed")
    return values


def validate(check: Callable[..., Any], *args: Any) -> Any:
    """Call a function, and turn its Error into a 422."""
    try:
        return check(*args)
    except Error as error:
        raise RequestError(422, str(error), code=error.code) from None


def add_status(app: FastAPI, admission: AdmissionControl) -> None:
    """The endpoints that describe the model and the state of the service."""

    @app.get("/v1/model", summary="The model and the limits of the service")
    async def model() -> Response:
        return AsciiJSONResponse(admission.served.describe(admission.settings))

    @app.get("/healthz", summary="Liveness: whether the process responds")
    async def healthz() -> Response:
        return AsciiJSONResponse({"status": "ok"})

    @app.get("/readyz", summary="Readiness: whether to send requests here")
    async def readyz() -> Response:
        if admission.ready:
            return AsciiJSONResponse({"status": "ready"})
        return AsciiJSONResponse({"status": "stopping"}, 503)

    @app.get("/metrics", summary="Prometheus metrics")
    async def metrics() -> Response:
        content = generate_latest(admission.metrics.registry)
        return Response(content, headers={"content-type": CONTENT_TYPE_LATEST})


def add_pages(app: FastAPI, settings: Settings) -> None:
    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        if not (WEB / "index.html").is_file():
            raise HTTPException(404, "this installation has no web page")
        return FileResponse(WEB / "index.html")

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        token_paths = TOKEN_PATHS if settings.token else ()
        return HTMLResponse(page(app.openapi(), base_url(request.headers), token_paths))

    @app.get("/favicon.ico", include_in_schema=False)  # browsers request it even where a page names an icon
    async def icon() -> Response:
        return FileResponse(WEB / "icon.svg")

    @app.get("/static/colours.css", include_in_schema=False)  # before the mount, which has no such file
    async def colours() -> Response:
        return Response(CSS, media_type="text/css")

    app.mount("/static", StaticFiles(directory=WEB, check_dir=False))


def add_error_handlers(app: FastAPI) -> None:
    """Give every error the same JSON form."""

    @app.exception_handler(RequestError)
    async def on_request_error(request: Request, error: RequestError) -> Response:
        return error_response(request, error.status, str(error), error.headers, error.code)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        return error_response(request, error.status_code, str(error.detail), dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def on_invalid_query(request: Request, error: RequestValidationError) -> Response:
        text = "; ".join(f"{detail['loc'][-1]}: {detail['msg']}" for detail in error.errors()[:3])
        return error_response(request, 422, text, code="request.value")

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # for the metrics; the client is gone

    @app.exception_handler(Exception)
    async def on_exception(request: Request, error: Exception) -> Response:
        return error_response(request, 500, "internal server error")  # the guard logs it
