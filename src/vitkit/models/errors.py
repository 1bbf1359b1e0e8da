"""The error of weight files, apart from all that needs torch."""


class WeightsError(ValueError):
    """A weight file is not what it should be; the message says what was expected and what was found."""
