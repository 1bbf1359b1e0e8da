"""The endpoints."""

import sys
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
from vitkit.inspection.subject import class_number
from vitkit.server.admission import AdmissionControl
from vitkit.server.docs import address, facts, page
from vitkit.server.guard import SECRET, Guard, Plain, Refusal, refused, to_json
from vitkit.server.inputs import Images, read_images
from vitkit.server.served_model import Served, attention_objection
from vitkit.server.settings import Settings
from vitkit.tasks.task import task_of

WEB = Path(__file__).parent / "web"
BYTES_A_VALUE = 30  # of an answer: a number, or a label with its probability
Top = Annotated[int, Query(ge=1, le=1000, description="how many labels of each image")]
Target = Annotated[str | None, Query(max_length=500, description="a label or number; the likeliest if none")]


def make_app(desk: AdmissionControl) -> Guard:
    """The application of a desk, inside its guard."""
    app = FastAPI(
        title="vitkit serve", version=vitkit.__version__, docs_url=None, redoc_url=None,
        description="Labels, features and attention maps of images by one model.",
    )  # fmt: skip
    add_refusals(app)
    add_questions(app, desk)
    add_facts(app, desk)
    add_pages(app, desk.settings)
    return Guard(app, desk.settings, desk.metrics, lambda: desk.stopping)


def add_questions(app: FastAPI, desk: AdmissionControl) -> None:
    """What a model is asked about images."""

    @app.post("/v1/predict", summary="The likeliest labels of images", **facts("/v1/predict"))
    async def predict(request: Request, top: Top = 5) -> Response:
        served = desk.served  # one model for the whole request, whatever is loaded meanwhile
        checked(task_of(served.model).check_head, served.model)

        def told(row: Any) -> dict[str, Any]:
            return answer(served, row[None], top)

        return await answered(desk, request, "predict", served, told, top)

    @app.post("/v1/embed", summary="The features that the head sees of images", **facts("/v1/embed"))
    async def embed(request: Request) -> Response:
        served = desk.served

        def told(row: Any) -> dict[str, Any]:
            return {"features": finite(row).tolist()}

        return await answered(desk, request, "embed", served, told)

    @app.post("/v1/attention", summary="Where the model looks in one image", **facts("/v1/attention"))
    async def attention(request: Request, target: Target = None) -> Response:
        served = desk.served
        if objection := attention_objection(served.model):
            raise Refusal(422, objection, code="inspection.unsupported")
        number = None if target is None else checked(class_number, served.model, target, False)
        desk.check_room("attention")
        with desk.holding() as hold:
            images, _ = await read_images(request, desk.settings, hold, desk.aside)
            if len(images) != 1:
                raise Refusal(422, f"attention is shown of one image, not of {len(images)}")
            (found,) = await desk.ask(request, "attention", served, images, number)
        if isinstance(found, BadImage):
            raise Refusal(422, str(found), code=found.code)
        maps, values = found
        said = {"top": []} if values is None else answer(served, values, 5)
        return Plain(await desk.aside(len(maps["maps"]), to_json, maps | said))


async def answered(
    desk: AdmissionControl, request: Request, kind: str, served: Served, told: Any, most: int = sys.maxsize
) -> Response:
    """Read the images of a request, ask, and give of each what was found, up to `most` values."""
    desk.check_room(kind)
    with desk.holding() as hold:
        images, bare = await read_images(request, desk.settings, hold, desk.aside)
        found = await desk.ask(request, kind, served, images)
    if bare and isinstance(found[0], BadImage):
        raise Refusal(422, str(found[0]), code=found[0].code)
    size = BYTES_A_VALUE * sum(min(most, row.numel()) for row in found if not isinstance(row, BadImage))
    return Plain(await desk.aside(size, encoded, served.name, images, found, told))


def encoded(model: str, images: Images, found: list[Any], told: Any) -> bytes:
    """An answer as JSON, image by image: no other thread runs while a piece of it is made."""
    pieces = [
        to_json({"image": name} | (unread(one) if isinstance(one, BadImage) else told(one)))
        for (name, _), one in zip(images, found, strict=True)
    ]
    return b'{"model":%b,"results":[%b]}' % (to_json(model), b",".join(pieces))


def answer(served: Served, values: Any, top: int) -> dict[str, Any]:
    """What the model says of one image, as its task serialises it."""
    return task_of(served.model).answers(served.model, finite(values), top)[0].brief()


def unread(error: BadImage) -> dict[str, str]:
    return {"error": str(error), "code": error.code}


def finite(values: Any) -> Any:
    if not values.isfinite().all():
        raise Refusal(422, "the model gives numbers that are not finite for this image", code="engine.failed")
    return values


def checked(check: Any, *values: Any) -> Any:
    try:
        return check(*values)
    except Error as error:
        raise Refusal(422, str(error), code=error.code) from None


def add_facts(app: FastAPI, desk: AdmissionControl) -> None:
    """What is asked about the service."""

    @app.get("/v1/model", summary="The model and the limits of the service")
    async def model() -> Response:
        return Plain(desk.served.facts(desk.settings))

    @app.get("/healthz", summary="Whether the process answers")
    async def healthz() -> Response:
        return Plain({"status": "ok"})

    @app.get("/readyz", summary="Whether requests should be sent here")
    async def readyz() -> Response:
        return Plain({"status": "ready"}) if desk.ready else Plain({"status": "stopping"}, 503)

    @app.get("/metrics", summary="Counters for Prometheus")
    async def metrics() -> Response:
        return Response(generate_latest(desk.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})


def add_pages(app: FastAPI, settings: Settings) -> None:
    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        if not (WEB / "index.html").is_file():
            raise HTTPException(404, "there is no page")
        return FileResponse(WEB / "index.html")

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        return HTMLResponse(page(app.openapi(), address(request.headers), SECRET if settings.token else ()))

    @app.get("/favicon.ico", include_in_schema=False)  # which browsers ask for, whatever a page says
    async def icon() -> Response:
        return FileResponse(WEB / "icon.svg")

    app.mount("/static", StaticFiles(directory=WEB, check_dir=False))


def add_refusals(app: FastAPI) -> None:
    """Every error in one form."""

    @app.exception_handler(Refusal)
    async def on_refusal(request: Request, error: Refusal) -> Response:
        return refused(request, error.status, str(error), error.headers, error.code)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        return refused(request, error.status_code, str(error.detail), dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def on_wrong_query(request: Request, error: RequestValidationError) -> Response:
        text = "; ".join(f"{one['loc'][-1]}: {one['msg']}" for one in error.errors()[:3])
        return refused(request, 422, text, code="request.value")

    @app.exception_handler(ClientDisconnect)
    async def on_gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # for the count; nobody reads it

    @app.exception_handler(Exception)
    async def on_our_error(request: Request, error: Exception) -> Response:
        return refused(request, 500, "an error of the service")  # the guard logs it
