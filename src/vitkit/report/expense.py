"""The cost of a run in words: for a person, and for a paper."""

from collections.abc import Mapping
from typing import Any

from vitkit.report.charts import short
from vitkit.report.html import Markup, details, facts, note, percent
from vitkit.report.terminal import duration


def cost_section(cost: Mapping[str, Any], spent: Mapping[str, Any], change: str = "") -> str:
    """Time, money and energy, then what a paper reports. change: the command that states another price."""
    if not cost:
        return ""
    seconds, processes = cost.get("seconds"), cost.get("processes", 1)
    many = f"{processes} × " if processes != 1 else ""
    speed = cost.get("images_per_second")
    told = {
        "time": None if seconds is None else f"{duration(seconds)} on {many}{cost.get('device', '?')}",
        "money": money(spent) if spent else None,
        "energy": energy(spent) if spent else None,
        "images seen": cost.get("images_seen"),
        "images a second": None if not speed else f"{speed:.0f}" if speed >= 10 else f"{speed:.1f}",
        "unusable images": cost.get("unusable_images") or None,
    }
    hint = note(f"With your own price of an hour: {change}") if change and spent else ""
    return facts(known(told)) + hint + details("For papers", facts(known(for_papers(cost))))


def for_papers(cost: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "exaFLOPs": cost.get("exaFLOPs"),
        "TPUv3-core-days": cost.get("tpu_v3_core_days"),
        "device hours": cost.get("device_hours"),
        "operations of the training": flops(cost.get("training_FLOPs")),
        "operations of one image forward": flops(cost.get("forward_FLOPs")),
        "parameters": cost.get("parameters"),
        "precision": cost.get("precision"),
        "share of the device's peak used": percent(cost["MFU"], 1) if cost.get("MFU") else None,
    }


def known(told: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in told.items() if value is not None}


def money(spent: Mapping[str, Any]) -> Markup:
    """What the hours cost, and the price of an hour that this rests on."""
    sign = "" if spent["given"] else "$"
    price = f"{sign}{spent['price']:,.2f}" if spent["price"] >= 0.01 else f"under {sign}0.01"
    hours = f"{spent['hours']:.2g}" if spent["hours"] < 10 else f"{spent['hours']:,.0f}"
    which = "" if spent["given"] else "an assumed "
    return Markup(f"{price} ({hours} device-hours at {which}{sign}{spent['per_hour']:,.2f} an hour)")


def energy(spent: Mapping[str, Any]) -> str:
    used = f"{spent['kWh']:.3g} kWh" if spent["kWh"] >= 0.1 else f"{1000 * spent['kWh']:.2g} Wh"
    if spent["watts"] is None:
        return f"{used}, as the device measured it"
    return f"about {used} (not measured: an assumed {spent['watts']} watts)"


def flops(count: float | None) -> str | None:
    """In FLOPs, with the unit that fits."""
    if count is None:
        return None
    units = ((1e18, "EFLOPs"), (1e15, "PFLOPs"), (1e12, "TFLOPs"), (1e9, "GFLOPs"), (1e6, "MFLOPs"))
    return next(
        (f"{count / unit:.4g} {told}" for unit, told in units if count >= unit), f"{short(count)} FLOPs"
    )
