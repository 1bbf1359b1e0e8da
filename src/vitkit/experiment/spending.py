"""What a run has cost a person: money and energy, measured where they are and else by stated assumptions."""

import re
from collections.abc import Mapping
from typing import Any

# dollars an hour of one device rented by the hour, and watts under load: round numbers to start from
DEVICES = {
    "B200": (5.0, 900), "H200": (3.5, 600), "H100": (3.0, 600), "A100": (1.8, 350), "L40S": (1.2, 300),
    "A10G?": (1.0, 150), "L4": (0.7, 70), "V100": (1.5, 250), "T4": (0.5, 70),
}  # fmt: skip
OTHER_GPU, COMPUTER = (1.0, 250), (0.2, 100)
GPU = re.compile(r"NVIDIA|Tesla|GeForce|Quadro|Radeon|Instinct", re.IGNORECASE)


def spent(cost: Mapping[str, Any], per_hour: float | None = None) -> dict[str, Any]:
    """Price and energy of a run's ledger, with what each rests on; `per_hour` takes the place of its price.

    given: the price of an hour was stated, in a currency of one's own; else it is assumed, in dollars.
    """
    hours = cost.get("device_hours")
    if hours is None:
        return {}
    assumed, watts = assumptions(str(cost.get("device", "")))
    if per_hour is None and cost.get("price") is not None and hours:
        per_hour = cost["price"] / hours
    rate = assumed if per_hour is None else per_hour
    measured = cost.get("energy_kWh")
    return {
        "hours": hours, "per_hour": rate, "given": per_hour is not None, "price": hours * rate,
        "kWh": hours * watts / 1000 if measured is None else measured,
        "watts": watts if measured is None else None,
    }  # fmt: skip


def assumptions(device: str) -> tuple[float, int]:
    """(dollars an hour, watts) of a device by its name."""
    for name, both in DEVICES.items():
        if re.search(rf"\b{name}\b", device):
            return both
    return OTHER_GPU if GPU.search(device) else COMPUTER
