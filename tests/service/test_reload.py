"""Model files that are replaced while they load, or by something that is no file."""

import os
import shutil
import socket
import time

import httpx
import pytest
from launch import picture, service, tiny
from refusals import refused

from vitkit.inference import predict as open_model
from vitkit.server import served_model
from vitkit.server.served_model import copy_model, file_stamps, open_served
from vitkit.server.settings import Settings
from vitkit.weights.save import save


def write_model(path, prefix: str) -> None:
    model = tiny()
    model.labels = tuple(f"{prefix} {number}" for number in range(5))
    beside = path.with_name(f"beside-{path.name}")
    save(model, beside)
    os.replace(beside, path)


@pytest.fixture
def place(tmp_path):
    write_model(tmp_path / "model.safetensors", "old")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("revision", [1, 2])
@pytest.mark.parametrize("damaged", [False, True])
def test_a_model_that_is_replaced_while_it_loads_is_loaded_again(place, monkeypatch, revision, damaged):
    """Also where what was read meanwhile could not be used."""
    loads = []

    def slow_load(*values):
        model = as_ever(*values)
        loads.append(1)
        if len(loads) == 1:
            write_model(place, "new")
            if damaged:
                raise ValueError("half of it")
        return model

    as_ever = open_model.load_model
    monkeypatch.setattr(served_model, "load_model", slow_load)
    found = open_served(Settings(model=str(place), device="cpu"), revision)
    assert found.model.labels[0] == "new 0" and len(loads) == 2
    assert found.stamps == file_stamps(str(place)) and found.revision == revision


def test_a_model_that_changes_all_the_time_is_refused(place, monkeypatch):
    def slow_load(*values):
        write_model(place, "new")
        return as_ever(*values)

    as_ever = open_model.load_model
    monkeypatch.setattr(served_model, "load_model", slow_load)
    with refused("file.unreadable", place, "5 times"):
        open_served(Settings(model=str(place), device="cpu"))


def put(kind: str, place) -> None:
    """Something else in the place of a model file."""
    place.unlink()
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "device":
        place.symlink_to("/dev/zero")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as wire:
            wire.bind(str(place))
    elif kind == "folder":
        place.mkdir()
        write_model(place / "model.safetensors", "inside")
    else:
        with place.open("wb") as file:
            file.truncate(101 * 10**9)


@pytest.mark.parametrize("revision", [1, 2])
@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "too large"])
def test_what_could_be_read_for_ever_is_refused_at_once(place, kind, revision):
    put(kind, place)
    large = kind == "too large"
    with refused("weights.untrusted" if large else "file.unreadable", place, *(["101000000000"] * large)):
        open_served(Settings(model=str(place), device="cpu"), revision)


def test_a_copy_is_checked_once_more_and_is_bounded(place, tmp_path, monkeypatch):
    folder = tmp_path / "copy"
    folder.mkdir()
    monkeypatch.setattr(served_model, "COPY_SECONDS", -1.0)
    with refused("file.unreadable", "model.safetensors", "-1 s"):
        copy_model(str(place), folder)
    put("pipe", place)
    with refused("file.unreadable", "model.safetensors"):
        copy_model(str(place), folder)


@pytest.mark.slow
def test_a_service_refuses_what_is_no_file_and_goes_on(place):
    with service(place, "--workers", "1") as found:
        for count, kind in enumerate(("pipe", "device", "folder"), 1):
            put(kind, place)
            until = time.monotonic() + 20
            while found.gauge('vitkit_reloads_total{outcome="refused"}') < count and time.monotonic() < until:
                time.sleep(0.2)
            answer = httpx.post(f"{found.url}/v1/predict", content=picture(1), timeout=20).json()
            assert answer["results"][0]["top"][0]["label"].startswith("old")
            assert found.gauge('vitkit_reloads_total{outcome="refused"}') == count
        shutil.rmtree(place)
        write_model(place, "new")
        until = time.monotonic() + 20
        while httpx.get(f"{found.url}/v1/model").json()["labels"][0] != "new 0" and time.monotonic() < until:
            time.sleep(0.2)
        assert httpx.get(f"{found.url}/v1/model").json()["labels"][0] == "new 0"
        assert "Traceback" not in found.log.read_text()
