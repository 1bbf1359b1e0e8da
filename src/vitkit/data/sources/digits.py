"""The built-in data set "digits": small enough to ship with the package, for demos and tests."""

from vitkit.data.sources.openers import Opener
from vitkit.data.sources.source import digits

OPENER = Opener(
    description="'digits'",
    matches=lambda place: place == "digits",
    open=lambda place, cache: {"all": digits()},
    order=10,  # the name wins over a folder that is called so
)
