"""For tests: a refusal with its code and the values that its message must name."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from vitkit.errors import CODES, Error


@contextmanager
def refused(code: str, *values: object) -> Iterator[pytest.ExceptionInfo[Error]]:
    """What happens inside must raise an Error of this code whose message names these values."""
    assert code in CODES, f"{code} is no code"
    with pytest.raises(Error) as caught:
        yield caught
    assert caught.value.code == code, f"{caught.value.code}: {caught.value}"
    missing = [value for value in values if str(value) not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
