"""The verb that puts a model behind HTTP."""

import signal
from typing import Annotated

from tyro.conf import arg

from vitkit.cli.words import Device, Model, View
from vitkit.errors import Error
from vitkit.options import Precision, size_in_bytes


def serve(
    model: Model,
    host: Annotated[str, arg(metavar="NAME", help="Others than this machine need a token.")] = "127.0.0.1",
    port: Annotated[int, arg(metavar="N", help="0: any that is free.")] = 8000,
    token: Annotated[
        str, arg(metavar="TEXT", help="What a client must send; better in VITKIT_TOKEN, where none sees it.")
    ] = "",
    allow_host: Annotated[
        tuple[str, ...], arg(metavar="NAME...", help="Names by which a proxy's clients know the service.")
    ] = (),
    engine: Annotated[str, arg(metavar="NAME", help="torch, or auto for the fastest here.")] = "torch",
    max_batch: Annotated[int, arg(metavar="N", help="Images computed together.")] = 32,
    max_wait_ms: Annotated[float, arg(metavar="MS", help="That an image waits for others.")] = 5.0,
    queue: Annotated[int, arg(metavar="N", help="Images that may wait; more are told to try again.")] = 256,
    timeout: Annotated[float, arg(metavar="S", help="Seconds until an answer.")] = 30.0,
    max_bytes: Annotated[str, arg(metavar="SIZE", help="Of a request's body.")] = "10MB",
    max_pixels: Annotated[float, arg(metavar="N", help="Of an image.")] = 20e6,
    workers: Annotated[int | None, arg(metavar="N", help="Processes that decode images.")] = None,
    view: View = "model",
    device: Device = "auto",
    precision: Annotated[Precision, arg(metavar="NAME", help="auto, fp32 or bf16.")] = "fp32",
) -> None:
    """Answer over HTTP: labels, features, attention maps, and a page to try them (docs/serving.md).

    A new model file in the place of the old one, or SIGHUP, is taken over without a lost answer. SIGTERM
    stops it in order.

    $ vitkit serve runs/photos
    $ VITKIT_TOKEN=$(openssl rand -hex 16) vitkit serve ViT-B/16.i21k-i1k-384 --host 0.0.0.0 --device cuda
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the service is ready to take it as "load again"
    try:
        from vitkit.service.run import serve as run
    except ModuleNotFoundError as error:
        raise Error(
            f"vitkit serve needs {error.name}, which is not installed: pip install 'vitkit[serve]'",
            code="request.extra-missing",
        ) from None
    from vitkit.service.settings import Settings, decoders, token_or_environment, whole

    settings = Settings(
        model=model, host=host, port=port, token=token_or_environment(token), allow_host=allow_host,
        engine=engine, view=view, device=device, precision=precision, max_batch=max_batch,
        max_wait_ms=max_wait_ms, queue=queue, timeout=timeout, max_bytes=size_in_bytes(max_bytes),
        max_pixels=whole("max-pixels", max_pixels), workers=decoders(workers),
    )  # fmt: skip
    run(settings)
