"""The error of weight files, apart from all that needs torch."""

from vitkit.errors import Error


class WeightsError(Error):
    """A weight file is not what it should be; the message says what was expected and what was found."""

    code = "weights.format"
