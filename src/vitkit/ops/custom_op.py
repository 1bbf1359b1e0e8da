"""CUDA functions registered as operators of PyTorch, which torch.compile leaves as they are."""

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library, infer_schema, register_fake

LIBRARY = Library("vitkit", "DEF")


def custom_op(fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a CUDA function as vitkit::NAME; `fake` returns empty results of the right shapes.

    torch.library.custom_op does the same, but imports the whole compiler at its first call: three seconds.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        LIBRARY.define(name + infer_schema(function, mutates_args=()))
        LIBRARY.impl(name, function, "CUDA")
        register_fake(f"vitkit::{name}", fake, lib=LIBRARY)
        return getattr(torch.ops.vitkit, name).default

    return register
