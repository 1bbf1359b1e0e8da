"""The sections of a report on cost and machine: time, price, energy, FLOPs and hardware in readable units."""

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from vitkit.report.charts import short
from vitkit.report.html import details, facts, fixed_percent, note
from vitkit.report.terminal import duration

INSTRUCTION_SETS = ("x86_64", "AMD64", "aarch64", "arm64")


def cost_section(cost: Mapping[str, Any], spent: Mapping[str, Any], pricing: str = "") -> Markup:
    """Time, price and energy, then the numbers for a paper. pricing: the command to set another price."""
    if not cost:
        return Markup()
    seconds, processes, speed = cost.get("seconds"), cost.get("processes", 1), cost.get("images_per_second")
    devices = f"{processes} × " if processes != 1 else ""
    device = device_name(cost.get("device", "?"))
    values = {
        "time": None if seconds is None else f"{duration(seconds)} on {devices}{device}",
        "price": price_text(spent) if spent else None,
        "energy": energy_text(spent) if spent else None,
        "images seen": cost.get("images_seen"),
        "images per second": None if not speed else f"{speed:,.0f}" if speed >= 10 else f"{speed:.1f}",
        "unusable images": cost.get("unusable_images") or None,
    }
    papers = {
        "exaFLOPs": cost.get("exaFLOPs"),
        "TPUv3-core-days": cost.get("tpu_v3_core_days"),
        "device hours": cost.get("device_hours"),
        "training compute": flops(cost.get("training_FLOPs")),
        "forward pass of one image": flops(cost.get("forward_FLOPs")),
        "parameters": cost.get("parameters"),
        "precision": cost.get("precision"),
        "model FLOPs utilization": fixed_percent(cost["MFU"], 1) if cost.get("MFU") else None,
    }
    hint = note(f"To set your own price per hour: {pricing}") if pricing and spent else Markup()
    return facts(without_none(values)) + hint + details("For papers", facts(without_none(papers)))


def environment_section(machine: Mapping[str, Any]) -> Markup:
    """Versions and hardware; the start without the syntax of ISO 8601."""
    started = str(machine.get("started", "")).replace("T", " ").replace("+00:00", " UTC")
    named = {"device": device_name(str(machine["device"]))} if "device" in machine else {}
    return facts(dict(machine) | named | ({"started": started} if started else {}))


def device_name(device: str) -> str:
    """The name of a device; an instruction set alone is that of a CPU without a known name."""
    return f"CPU ({device})" if device in INSTRUCTION_SETS else device


def without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def price_text(spent: Mapping[str, Any]) -> str:
    """The price of the device hours, and the price per hour it is based on."""
    sign = "" if spent["given"] else "$"
    price = f"{sign}{spent['price']:,.2f}" if spent["price"] >= 0.01 else f"under {sign}0.01"
    hours = f"{spent['hours']:.2g}" if spent["hours"] < 10 else f"{spent['hours']:,.0f}"
    assumed = "" if spent["given"] else "an assumed "
    return f"{price} ({hours} device hours at {assumed}{sign}{spent['per_hour']:,.2f} per hour)"


def energy_text(spent: Mapping[str, Any]) -> str:
    amount = f"{spent['kWh']:.3g} kWh" if spent["kWh"] >= 0.1 else f"{1000 * spent['kWh']:.2g} Wh"
    if spent["watts"] is None:
        return f"{amount}, measured by the device"
    return f"about {amount} (not measured; assumes {spent['watts']} watts)"


def flops(count: float | None) -> str | None:
    """A number of FLOPs with a suitable unit."""
    if count is None:
        return None
    units = ((1e18, "EFLOPs"), (1e15, "PFLOPs"), (1e12, "TFLOPs"), (1e9, "GFLOPs"), (1e6, "MFLOPs"))
    return next(
        (f"{count / size:.4g} {unit}" for size, unit in units if count >= size), f"{short(count)} FLOPs"
    )
