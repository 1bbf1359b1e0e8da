"""Images per second, the largest batch, energy from NVML, and the predicted pace on many GPUs."""

# n GPUs, g of them in a node, N nodes; P parameters

import ctypes
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from vitkit.errors import Error

MOST = 2**16  # images at a time that are tried at most
GAIN = 1.03  # a larger batch is faster if it is by so much
NO_FASTER = 2  # so many batch sizes one after the other that are not end the search; one may be a disturbance
REPEATS = 0.05  # share of the time for which one batch size is repeated: all 17 fit


def images_per_second(
    run: Callable[[int], None], seconds: float, most: int = MOST
) -> tuple[float, int] | None:
    """The best rate over batches of 1, 2, 4, ... images and that batch; None where not one image fits.

    `run` computes so many images and waits for them. Larger batches are tried as long as they are faster and
    there is time for another one; one batch is always timed. The first run of each size is neither timed nor
    part of the time: a GPU loads kernels in it.
    """
    best, left, slower = (0.0, 0), seconds, 0
    images = 1
    while images <= most and slower < NO_FASTER:
        try:
            run(images)
            took, each = timed(partial(run, images), REPEATS * seconds)
        except torch.OutOfMemoryError:
            break
        rate = images / each
        slower = 0 if rate > GAIN * best[0] else slower + 1
        best = max(best, (rate, images))
        left -= took
        if left < each:  # a batch of twice the size takes at least as long
            break
        images *= 2
    return best if best[1] else None


def timed(work: Callable[[], None], seconds: float) -> tuple[float, float]:
    """Seconds of as many calls as fit into the time, at least one; and of one of them, the mean."""
    begun, calls = time.monotonic(), 0
    while not calls or time.monotonic() - begun < seconds:
        work()
        calls += 1
    took = time.monotonic() - begun
    return took, took / calls


def largest_that_fits(fits: Callable[[int], bool], seconds: float, most: int = MOST) -> int:
    """The largest number for which `fits` is true, to 1/16 or as near as time allows; 0 for none."""
    end = time.monotonic() + seconds
    low, high = 0, 1
    while high <= most and time.monotonic() < end:
        if not fits(high):
            break
        low, high = high, 2 * high
    else:
        return low
    while high - low > max(1, low // 16) and time.monotonic() < end:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


Reader = Callable[[], float | None]


class Meter:
    """Joules between one look and the next; None where the device does not report them.

    The counter is the device's own and counts whatever runs on it, idle time too. It is there from Volta on.
    """

    def __init__(self, device: str):
        self.read = reader(device)
        self.last = self.read()

    def lap(self) -> float | None:
        """Since the last look."""
        before, self.last = self.last, self.read()
        return None if before is None or self.last is None else self.last - before


def reader(device: str) -> Reader:
    """A function that tells the joules since the driver was loaded."""
    if not device.startswith("cuda"):
        return nothing
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        number = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        handle = ctypes.c_void_p()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(number, ctypes.byref(handle)):
            return nothing
    except (OSError, AttributeError):  # no such library, or one without these functions
        return nothing

    def joules() -> float | None:
        millijoules = ctypes.c_ulonglong()
        failed = nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
        return None if failed else millijoules.value / 1000

    return joules


def nothing() -> float | None:
    return None


BYTES = 4  # of a parameter and of a gradient: both travel in float32
BUCKET = 25 * 2**20  # bytes of gradients that DDP sends at a time, by default
PARALLEL = ("ddp", "fsdp")


@dataclass(frozen=True)
class Links:
    """How a GPU reaches the others: bytes a second one way, the share of them that is had, seconds a hop.

    Shares are what NCCL's people expect to see (github.com/NVIDIA/nccl-tests, issues 212 and 290), hops what
    its own model counts for a ring by the protocol LL128 (github.com/NVIDIA/nccl, src/graph/tuning.cc).
    """

    inside: float = 450e9  # a node: NVLink 4, 900 GB/s both ways together (NVIDIA's data sheet of the H200)
    inside_share: float = 0.82
    inside_hop: float = 1.9e-6
    between: float = 50e9  # nodes: InfiniBand NDR, 400 Gb/s, an adapter for each GPU
    between_share: float = 0.92
    between_hop: float = 4.0e-6
    node: int = 8  # GPUs of it

    def __post_init__(self):
        for field, value in vars(self).items():
            if not value > 0:
                raise Error(f"{field} of the links is {value}; it must be more than 0", code="request.value")

    def nodes(self, gpus: int) -> tuple[int, int]:
        """(nodes, GPUs of each)."""
        each = min(gpus, self.node)
        if gpus < 1 or gpus % each:
            raise Error(
                f"{gpus} GPUs are no whole nodes of {self.node}; give a multiple of {self.node}",
                code="request.value",
            )
        return gpus // each, each

    def passed(self, size: float, gpus: int) -> float:
        """Seconds, without hops, in which `size` bytes go once round: to all, or added up from all.

        A GPU sends (n-1)/n of them. Rings are laid so that each leaves a node by another adapter, so 1/g of
        what a GPU sends goes over its own; the slower of the two kinds of links counts.
        """
        nodes, each = self.nodes(gpus)
        sent = size * (gpus - 1) / gpus
        out = sent / each if nodes > 1 else 0.0
        return max(
            (sent - out) / (self.inside * self.inside_share), out / (self.between * self.between_share)
        )

    def all_reduce(self, size: float, gpus: int) -> float:
        """Seconds: twice round, first within the nodes, then between them."""
        nodes, each = self.nodes(gpus)
        hops = (each - 1) * self.inside_hop + (nodes - 1) * self.between_hop
        return 2 * (self.passed(size, gpus) + hops)

    def all_gather(self, size: float, gpus: int) -> float:
        """Seconds of an all-gather or a reduce-scatter: once round a ring that visits every GPU."""
        nodes, _ = self.nodes(gpus)
        hops = (gpus - nodes) * self.inside_hop + (nodes - 1) * self.between_hop
        return self.passed(size, gpus) + hops


H200 = Links()


@dataclass(frozen=True)
class Work:
    """What each GPU computes in a step. `pace`: images a second of one alone that recomputes nothing."""

    parameters: int
    blocks: int
    images: float  # of one GPU
    pace: float
    recompute: bool = False

    def __post_init__(self):
        for field in ("parameters", "blocks", "images", "pace"):
            if not getattr(self, field) > 0:
                raise Error(
                    f"{field} of the work is {getattr(self, field)}; it must be more than 0",
                    code="request.value",
                )

    @property
    def forward(self) -> float:
        """Seconds: a third of a step, since the backward pass computes two products for each of its own."""
        return self.images / self.pace / 3

    @property
    def backward(self) -> float:
        return (3 if self.recompute else 2) * self.forward


@dataclass(frozen=True)
class Pace:
    """A step of so many GPUs in seconds: computing, sending, and what of the sending cannot be hidden."""

    gpus: int
    images: float  # of all
    computing: float
    sending: float
    exposed: float
    limited: bool  # by the links: computation does not suffice to hide what is sent

    @property
    def images_per_second(self) -> float:
        return self.images / (self.computing + self.exposed)

    @property
    def efficiency(self) -> float:
        """Of the pace of as many single GPUs."""
        return self.computing / (self.computing + self.exposed)

    @property
    def unhidden(self) -> float:
        """The efficiency if nothing were sent behind computation; by these links no run is worse."""
        return self.computing / (self.computing + self.sending)

    def days(self, images: float) -> float:
        return images / self.images_per_second / 86400


def scale_out(work: Work, gpus: int, parallel: str, links: Links = H200, bucket: float = BUCKET) -> Pace:
    """The pace of a step with every model whole (ddp) or cut over all GPUs (fsdp)."""
    if parallel not in PARALLEL:
        raise Error(f"parallel must be {' or '.join(PARALLEL)}, not {parallel!r}", code="request.value")
    size, parts = BYTES * work.parameters, work.blocks
    if parallel == "ddp":
        parts = math.ceil(size / bucket)
        one = links.all_reduce(size / parts, gpus)
        short = max(0.0, one - work.backward / parts)  # of the computation that a bucket has beside it
        sending, ends = parts * one, one  # the last bucket has none
    else:
        one = links.all_gather(size / parts, gpus)
        short = max(0.0, one - work.forward / parts) + max(0.0, 2 * one - work.backward / parts)
        sending, ends = 3 * parts * one, 3 * one  # the first gather of either pass and the last scatter
    computing, exposed = work.forward + work.backward, ends + (parts - 1) * short
    return Pace(gpus, gpus * work.images, computing, sending, exposed, short > 0)


def limit(work: Callable[[int], Work], counts: list[int], parallel: str, links: Links = H200) -> int | None:
    """The first of these numbers of GPUs at which the links set the pace; `work` of each by their number."""
    return next((n for n in counts if scale_out(work(n), n, parallel, links).limited), None)
