"""Images per second, the largest batch size, energy from NVML, and predicted throughput on many GPUs."""

import ctypes
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from vitkit.errors import Error

MOST = 2**16  # largest batch size tried
GAIN = 1.03  # a larger batch counts as faster from this factor on
NO_FASTER = 2  # stop after this many sizes in a row without a gain; a single one may be noise
REPEATS = 0.05  # share of the time budget spent on one batch size: all 17 fit


def images_per_second(
    run: Callable[[int], None], seconds: float, most: int = MOST
) -> tuple[float, int] | None:
    """The best throughput over batch sizes 1, 2, 4, ... and its batch size; None if no image fits.

    `run` processes a batch of the given size and synchronises. Larger batches are tried while they are faster
    and time is left; at least one size is timed. The first run of each size is a warm-up that is not timed,
    because the GPU loads kernels in it.
    """
    best, remaining, slower = (0.0, 0), seconds, 0
    images = 1
    while images <= most and slower < NO_FASTER:
        try:
            run(images)
            elapsed, per_call = time_calls(partial(run, images), REPEATS * seconds)
        except torch.OutOfMemoryError:
            break
        rate = images / per_call
        slower = 0 if rate > GAIN * best[0] else slower + 1
        best = max(best, (rate, images))
        remaining -= elapsed
        if remaining < per_call:  # a batch twice as large takes at least as long
            break
        images *= 2
    return best if best[1] else None


def time_calls(work: Callable[[], None], seconds: float) -> tuple[float, float]:
    """Call `work` repeatedly for the given time, at least once: total seconds and mean seconds per call."""
    start, calls = time.monotonic(), 0
    while not calls or time.monotonic() - start < seconds:
        work()
        calls += 1
    elapsed = time.monotonic() - start
    return elapsed, elapsed / calls


def largest_that_fits(fits: Callable[[int], bool], seconds: float, most: int = MOST) -> int:
    """The largest number for which `fits` is true; 0 if there is none.

    Doubling always finds it to a factor of two; the time then limits how far it is refined, to 1/16 at best.
    """
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    end = time.monotonic() + seconds
    while low and high <= most and high - low > max(1, low // 16) and time.monotonic() < end:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


Reader = Callable[[], float | None]


class Meter:
    """Energy in joules between two readings; None if the device does not report it.

    The hardware counter includes everything that runs on the device, and idle time. GPUs have it since Volta.
    """

    def __init__(self, device: str):
        self.read = energy_reader(device)
        self.last = self.read()

    def lap(self) -> float | None:
        """Joules since the previous reading."""
        before, self.last = self.last, self.read()
        return None if before is None or self.last is None else self.last - before


def energy_reader(device: str) -> Reader:
    """A function that returns the joules since the driver was loaded."""
    opened = open_nvml(device)
    if opened is None:
        return no_reading
    nvml, handle = opened

    def joules() -> float | None:
        millijoules = ctypes.c_ulonglong()
        failed = nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
        return None if failed else millijoules.value / 1000

    return joules


def busy_reader(device: str) -> Reader:
    """A function that returns the share of about the last second in which the GPU computed, by its driver."""
    opened = open_nvml(device)
    if opened is None:
        return no_reading
    nvml, handle = opened

    def busy() -> float | None:
        percent = (ctypes.c_uint * 2)()  # of the time: computing, and using its memory
        return None if nvml.nvmlDeviceGetUtilizationRates(handle, percent) else percent[0] / 100

    return busy


def open_nvml(device: str) -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """NVIDIA's management library and its handle of a GPU; None without them."""
    if not device.startswith("cuda"):
        return None
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        handle = ctypes.c_void_p()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)):
            return None
    except (OSError, AttributeError):  # NVML is missing, or too old for these functions
        return None
    return nvml, handle


def no_reading() -> float | None:
    return None


BYTES = 4  # per parameter or gradient: both are sent in float32
BUCKET = 25 * 2**20  # default size of a DDP gradient bucket in bytes
PARALLEL = ("ddp", "fsdp")


@dataclass(frozen=True)
class Links:
    """Interconnects inside and between nodes: bandwidth in bytes/s one way, efficiency, latency per hop.

    Efficiencies are those the NCCL developers expect (github.com/NVIDIA/nccl-tests, issues 212 and 290),
    latencies those of NCCL's own model of an LL128 ring (github.com/NVIDIA/nccl, src/graph/tuning.cc).
    """

    inside: float = 450e9  # NVLink 4: 900 GB/s bidirectional (H200 data sheet)
    inside_share: float = 0.82
    inside_hop: float = 1.9e-6
    between: float = 50e9  # InfiniBand NDR: 400 Gb/s, one adapter per GPU
    between_share: float = 0.92
    between_hop: float = 4.0e-6
    node: int = 8  # GPUs per node

    def __post_init__(self):
        for field, value in vars(self).items():
            if not value > 0:
                raise Error(f"Links.{field} must be above 0, not {value}", code="request.value")

    def nodes(self, gpus: int) -> tuple[int, int]:
        """(nodes, GPUs per node)."""
        per_node = min(gpus, self.node)
        if gpus < 1 or gpus % per_node:
            raise Error(
                f"{gpus} GPUs do not fill nodes of {self.node}; give a multiple of {self.node}",
                code="request.value",
            )
        return gpus // per_node, per_node

    def ring_seconds(self, size: float, gpus: int) -> float:
        """Seconds, without latency, to send `size` bytes once around the ring.

        Each of n GPUs sends (n-1)/n of the bytes. NCCL's rings leave a node through different adapters, so
        each adapter carries 1/(GPUs per node) of them; the slower kind of link is the bottleneck.
        """
        nodes, per_node = self.nodes(gpus)
        total = size * (gpus - 1) / gpus
        across_nodes = total / per_node if nodes > 1 else 0.0
        return max(
            (total - across_nodes) / (self.inside * self.inside_share),
            across_nodes / (self.between * self.between_share),
        )

    def all_reduce(self, size: float, gpus: int) -> float:
        """Seconds of an all-reduce: twice around the ring, first inside the nodes, then between them."""
        nodes, per_node = self.nodes(gpus)
        latency = (per_node - 1) * self.inside_hop + (nodes - 1) * self.between_hop
        return 2 * (self.ring_seconds(size, gpus) + latency)

    def all_gather(self, size: float, gpus: int) -> float:
        """Seconds of an all-gather or a reduce-scatter: once around a ring of all GPUs."""
        nodes, _ = self.nodes(gpus)
        latency = (gpus - nodes) * self.inside_hop + (nodes - 1) * self.between_hop
        return self.ring_seconds(size, gpus) + latency


H200 = Links()


@dataclass(frozen=True)
class Work:
    """The work of each GPU in a training step. `pace`: images/s of a single GPU without recomputation."""

    parameters: int
    blocks: int
    images: float  # per GPU
    pace: float
    recompute: bool = False

    def __post_init__(self):
        for field in ("parameters", "blocks", "images", "pace"):
            if not getattr(self, field) > 0:
                raise Error(
                    f"Work.{field} must be above 0, not {getattr(self, field)}",
                    code="request.value",
                )

    @property
    def forward(self) -> float:
        """Seconds: a third of a step, because the backward pass has two matrix products for each one."""
        return self.images / self.pace / 3

    @property
    def backward(self) -> float:
        return (3 if self.recompute else 2) * self.forward


@dataclass(frozen=True)
class Pace:
    """A training step on many GPUs: seconds of computation, communication, and exposed communication."""

    gpus: int
    images: float  # of all GPUs
    computing: float
    sending: float
    exposed: float  # not overlapped with computation
    limited: bool  # whether communication takes longer than the computation that overlaps it

    @property
    def images_per_second(self) -> float:
        return self.images / (self.computing + self.exposed)

    @property
    def efficiency(self) -> float:
        """Throughput relative to perfect scaling."""
        return self.computing / (self.computing + self.exposed)

    @property
    def efficiency_without_overlap(self) -> float:
        """The efficiency without any overlap, which is a lower bound."""
        return self.computing / (self.computing + self.sending)

    def days(self, images: float) -> float:
        return images / self.images_per_second / 86400


def scale_out(work: Work, gpus: int, parallel: str, links: Links = H200, bucket: float = BUCKET) -> Pace:
    """Predict a training step with replicated (ddp) or sharded (fsdp) parameters."""
    if parallel not in PARALLEL:
        raise Error(f"parallel must be {' or '.join(PARALLEL)}, not {parallel!r}", code="request.value")
    size, parts = BYTES * work.parameters, work.blocks
    if parallel == "ddp":
        parts = math.ceil(size / bucket)
        seconds = links.all_reduce(size / parts, gpus)  # per bucket
        excess = max(0.0, seconds - work.backward / parts)  # beyond the computation that overlaps a bucket
        sending, ends = parts * seconds, seconds  # nothing overlaps the last bucket
    else:
        seconds = links.all_gather(size / parts, gpus)  # per block
        excess = max(0.0, seconds - work.forward / parts) + max(0.0, 2 * seconds - work.backward / parts)
        # nothing overlaps the first all-gather of both passes and the last reduce-scatter
        sending, ends = 3 * parts * seconds, 3 * seconds
    computing, exposed = work.forward + work.backward, ends + (parts - 1) * excess
    return Pace(gpus, gpus * work.images, computing, sending, exposed, excess > 0)


def limit(work: Callable[[int], Work], counts: list[int], parallel: str, links: Links = H200) -> int | None:
    """The first number of GPUs at which communication is the bottleneck; `work` maps that number to Work."""
    return next((n for n in counts if scale_out(work(n), n, parallel, links).limited), None)
