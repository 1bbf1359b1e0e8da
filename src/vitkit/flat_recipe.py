"""Recipes as flat tables, by the names that --set takes; without torch."""

from typing import Any


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables to dotted names, as --set uses them."""
    rows: dict[str, Any] = {}
    for name, value in table.items():
        rows |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return rows


def settings_of(recipe: dict[str, Any]) -> dict[str, Any]:
    """The fields of a recipe's JSON table by the names that --set uses; model options as strings.

    Nothing is validated: the table may come from an earlier version, or may not be a recipe at all.
    """
    table = {name: content for name, content in recipe.items() if name not in ("version", "auto")}
    if isinstance(options := table.get("model_options"), dict):
        table["model_options"] = [f"{name}={setting(value)}" for name, value in flat(options).items()]
    if isinstance(table.get("task_options"), dict):
        table |= table.pop("task_options")  # by their own names, as in mae.mask_ratio
    return flat(table)


def setting(value: Any) -> str:
    """A value in the syntax of --set."""
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
