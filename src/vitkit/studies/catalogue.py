"""The ten studies by name."""

from typing import Any

from vitkit.errors import Error
from vitkit.studies.shapes import PARTS
from vitkit.studies.sizes import COMPARISONS
from vitkit.studies.study import Study

STUDIES: dict[str, Study] = {study.name: study for study in (*COMPARISONS, *PARTS)}


def study(name: str) -> Study:
    if name not in STUDIES:
        raise Error(f"no study {name!r}; known: {', '.join(STUDIES)}", code="study.unknown")
    return STUDIES[name]


def listed() -> list[dict[str, Any]]:
    """For whoever asks what there is."""
    return [{"study": one.name, "shows": one.shows, "about": one.about} for one in STUDIES.values()]
