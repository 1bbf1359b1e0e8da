"""What service/ takes from uvicorn without a promise: this fails first when it changes."""

import ast
import asyncio
import inspect
import re
import textwrap
import tomllib
from importlib.metadata import version
from pathlib import Path

import h11
import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from vitkit.server.http import TimedProtocol
from vitkit.server.process import Server

ROOT = Path(__file__).parents[2]
OURS = {
    "limits",
    "address",
    "phase",
    "phase_start",
    "timer",
    "half_closed",
}  # TimedProtocol's own attributes


def written_by(function) -> set[str]:
    """The attributes of self that a method sets, or calls and reads."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def test_the_version_is_one_that_was_tried():
    serve = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["serve"]
    (asked,) = (one for one in serve if one.startswith("uvicorn"))
    least, below = ([int(part) for part in bound.split(".")] for bound in re.findall(r"[\d.]+", asked))
    assert least <= [int(part) for part in version("uvicorn").split(".")[:2]] < below


def test_a_connection_has_all_that_timed_reads_of_it():
    async def made() -> H11Protocol:
        return H11Protocol(uvicorn.Config(lambda: None, log_config=None), ServerState(), {})

    plain = asyncio.run(made())
    used = set().union(*(written_by(one) for one in vars(TimedProtocol).values() if inspect.isfunction(one)))
    own = OURS | set(vars(TimedProtocol))
    assert not {name for name in used - own if not hasattr(plain, name)}
    assert {"conn", "cycle", "transport", "loop", "scope", "client", "timeout_keep_alive_task"} <= used
    assert isinstance(plain.conn, h11.Connection) and plain.timeout_keep_alive_task is None
    assert {"response_complete", "more_body"} <= written_by(RequestResponseCycle.__init__)


@pytest.mark.parametrize(
    ("name", "caller"),
    [
        ("connection_made", None), ("connection_lost", None), ("eof_received", None),
        ("handle_events", "data_received"), ("on_response_complete", "handle_events"),
        ("send_400_response", "handle_events"),
    ],
)  # fmt: skip
def test_what_timed_overrides_is_still_called(name, caller):
    theirs, ours = (
        inspect.signature(getattr(kind, name)).parameters for kind in (H11Protocol, TimedProtocol)
    )
    assert list(theirs) == list(ours)
    assert caller is None or name in written_by(getattr(H11Protocol, caller))


def test_the_server_still_asks_on_every_tick_and_for_every_signal():
    assert "on_tick" in written_by(uvicorn.Server.main_loop)
    assert {"should_exit", "force_exit"} <= written_by(uvicorn.Server.__init__)
    assert "handle_exit" in written_by(uvicorn.Server.capture_signals)
    for name in ("on_tick", "handle_exit"):
        theirs, ours = (
            inspect.signature(getattr(kind, name)).parameters for kind in (uvicorn.Server, Server)
        )
        assert list(theirs) == list(ours)
