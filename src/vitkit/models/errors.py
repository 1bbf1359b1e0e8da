"""Errors about models and weight files, importable without torch."""

from vitkit.errors import Error


class ConfigError(Error):
    """A model's options contradict each other or are out of range."""

    code = "model.config"


class WeightsError(Error):
    """A weight file is not what it should be; the message names what was expected and what the file holds."""

    code = "weights.format"
