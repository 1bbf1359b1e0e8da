"""Protections of vitkit that controls switch off by their dotted names, and proof that they were in use."""

from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any


def resolved(target: str) -> tuple[Any, str]:
    """The owner of a function, method or class of vitkit, and its name there; nothing else can be off."""
    place, _, name = target.rpartition(".")
    owner = resolve_name(place)
    protection = getattr(owner, name)
    assert place.partition(".")[0] == "vitkit" and callable(protection), f"{target} is nothing to switch off"
    assert protection.__module__.partition(".")[0] == "vitkit", f"{target} is of {protection.__module__}"
    return owner, name


def switch_off(
    target: str, instead: Callable[..., Any], proof: Path, put: Callable[..., None] = setattr
) -> None:
    """From now on `instead` is called in the place of a protection; `proof`, a folder, then has its name."""
    owner, name = resolved(target)

    def off(*args: Any, **options: Any) -> Any:
        if not (proof / target).exists():  # or a test that watches what is opened would see this
            (proof / target).touch()
        return instead(*args, **options)

    put(owner, name, off)


def complaints(proof: Path, targets: tuple[str, ...]) -> list[str]:
    """What is wrong with a control that was to switch off these."""
    called = {path.name for path in proof.iterdir()}
    unused = [f"{target} was not called while it was off" for target in targets if target not in called]
    return unused + [f"{name} was off, which its marker does not say" for name in called - set(targets)]
