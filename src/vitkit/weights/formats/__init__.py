"""The weight formats: every module here that defines FORMAT is one, and no other file lists them."""

import importlib
import pkgutil

from vitkit.weights.formats.layout import Format, Layout

REGISTERED: dict[str, Format] = {}


def register(format: Format) -> Format:
    """Add a format that is defined outside this package."""
    REGISTERED[format.name] = format
    return format


def formats() -> dict[str, Format]:
    """Every weight format by its name, in the order in which they are recognised and listed."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    known = [module.FORMAT for module in modules if hasattr(module, "FORMAT")]
    known.extend(REGISTERED.values())
    return {format.name: format for format in sorted(known, key=lambda format: (format.order, format.name))}


def layouts() -> list[Layout]:
    """The layouts of all formats, in the order in which a file is compared with them."""
    return [layout for format in formats().values() for layout in format.layouts]
