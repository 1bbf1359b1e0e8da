"""Functions on a GPU as operations of PyTorch, which a compiler leaves as they are."""

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library, infer_schema, register_fake

OPERATIONS = Library("vitkit", "DEF")


def operation(fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function on a GPU one that a compiler leaves as it is; `fake` gives its empty results.

    PyTorch's custom_op is the same, but imports the whole compiler at its first call: three seconds.
    """

    def defined(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        OPERATIONS.define(name + infer_schema(function, mutates_args=()))
        OPERATIONS.impl(name, function, "CUDA")
        register_fake(f"vitkit::{name}", fake, lib=OPERATIONS)
        return getattr(torch.ops.vitkit, name).default

    return defined
