"""What a run has cost: the ledger of its images, time and energy."""

from typing import Any

from vitkit.evaluation.cost import forward_flops, ledger, parameters, peak_flops
from vitkit.models.variants import Model
from vitkit.training.runtime import Runtime


def cost(
    model: Model, runtime: Runtime, *, seen: int, seconds: float, joules: float | None, an_hour: float | None
) -> dict[str, Any]:
    """Of a model that has seen so many images; energy is summed over the processes, if each can tell it."""
    facts = runtime.facts()
    used = runtime.everyones(joules)
    found = ledger(
        parameters=parameters(model), images_seen=seen, forward=forward_flops(model.config),
        device_seconds=runtime.world * seconds, joules=None if None in used else sum(used),
        price_per_hour=an_hour, peak=peak_flops(facts["device"], facts["precision"]),
    )  # fmt: skip
    rate = seen / seconds if seconds else None
    return {**found.to_json(), "seconds": round(seconds, 2), "images_per_second": rate, **facts}
