"""Weight files as untrusted data: every hostile one is refused, at once, and nothing of it runs."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hostile import KINDS, Files, Good, calls, carded, js, kind, npy, npz, parts, pth, safe, unzipped, zipped

import vitkit

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
FAULTS = Path(__file__).parent.parent / "faults"
SOUND = ("own.safetensors", "official.npz", "timm.pth", "hf")
SIZES = {"width": 32, "depth": 1, "heads": 2, "hidden": 32, "image_size": 32, "classes": 3}
MISFITS = ("cards", "settings")  # sound containers that make no model: the base class will do
INDEX, MODEL, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
REASONS = {  # the code, and what the message names
    "contents/nan": ("weights.values", "not finite"), "contents/int": ("weights.values", "torch."),
    "tensors/expand": ("weights.untrusted", "shape"), "programs/script": ("weights.untrusted", "TorchScript"),
    "programs/checkpoint": ("weights.untrusted", "distributed"),
    "folders/out": ("weights.untrusted", "outside"), "zips/encrypted": ("weights.untrusted", "encrypted"),
    "cards/width": ("weights.shape", "shape"), "compressed/zeros": ("weights.untrusted", "compressed"),
    "strangers/page": ("weights.format", "web page"), "strangers/pointer": ("weights.format", "LFS"),
    "pickles/system.bin": ("weights.untrusted", "pickle"),
}  # fmt: skip
# Loads each file and prints what came of it; a file that takes far too long ends the process.
DRIVER = """
import json, os, resource, signal, sys, time
import torch.jit, vitkit
BAD = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.remove", "os.rename", "os.mkdir",
       "subprocess.", "pty.", "socket.", "ctypes.dlopen", "shutil.", "tempfile.", "pickle.", "urllib.")
events = []
def hook(event, args):
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    runs = event == "exec" and not os.path.exists(getattr(args[0], "co_filename", ""))
    if writes or runs or event.startswith(BAD):
        events.append(event)
def megabytes(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) / 1024
def attempt(path):
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    start = time.process_time()  # of this process: others may keep the machine busy
    signal.alarm(12)
    events.clear()
    try:
        error, message = "loaded", type(vitkit.load(path, heads=None if os.path.isdir(path) else 2)).__name__
        code = ""
    except BaseException as caught:
        error, message = [c.__name__ for c in type(caught).__mro__], str(caught)
        code = getattr(caught, "code", "")
    seen = sorted(set(events))
    signal.alarm(0)
    told = dict(error=error, code=code, message=message, events=seen, seconds=time.process_time() - start)
    print(json.dumps([path, told | {"grown": megabytes("VmHWM") - base}]), flush=True)
(good, paths), base = json.load(sys.stdin), 0
for path in good:
    attempt(path)
base = megabytes("VmRSS")
resource.setrlimit(resource.RLIMIT_AS, (int(megabytes("VmSize") + 4096) * 2**20,) * 2)
sys.addaudithook(hook)
for path in paths:
    attempt(path)
"""


# --- hostile contents of sound containers


@kind
def npys(good: Good, folder: Path) -> Files:
    name = "Transformer/encoder_norm/bias.npy"
    shapes = ("(100000000000,)", "(-32,)", "(-1, -32)", f"({2**70}, 0)", "(32.0,)", "32", "(" * 900, "f()")
    types = ("O", "<U8", "S4", "<M8[s]", "<c8", "<f16", "V4", "x")
    wrong = [npy(shape, bytes(size)) for shape in shapes for size in (0, 128)]
    wrong += [npy("(32,)", bytes(32 * size), repr(type)) for type in types for size in (0, 4, 8, 16, 32)]
    wrong += [npy("(32,)", bytes(128), version=bytes([version, 0])) for version in (3, 9)]
    wrong += [npy("(32,)", bytes(128), "[('a', '<f4')]"), b"\x93NUMPY\2\0\xff\xff\xff\xff{}"]
    for n, data in enumerate(wrong):
        yield f"{n}.npz", zipped(unzipped(good.npz) | {name: data})
    yield "words.npz", npz(good.arrays | {"labels": np.array(["a", "b"])})
    yield "objects.npz", npz(good.arrays | {"labels": np.array([{}, None], dtype=object)})


@kind
def contents(good: Good, folder: Path) -> Files:
    head, body = parts(good.own)
    for text, value in (("nan", np.nan), ("inf", np.inf), ("minus", -np.inf)):
        tail, cls = np.float32(value).tobytes(), good.arrays["cls"].copy()
        cls[..., 3] = value
        arrays, state = good.arrays | {"cls": cls}, good.state | {"cls_token": torch.tensor(cls)}
        yield f"nan_{text}.npz", npz(arrays)
        yield f"nan_{text}.pth", pth(state)
        yield f"nan_half_{text}.pth", pth({name: t.bfloat16() for name, t in state.items()})
        yield f"nan_{text}.safetensors", good.own[:-4] + tail
        yield f"nan_{text}_hf", good.hf | {MODEL: good.hf[MODEL][:-4] + tail}
    yield "int.safetensors", safe(head | {"class_token": head["class_token"] | {"dtype": "I32"}}, body)
    for number in ("int32", "uint8", "bool", "int16"):
        yield f"int_{number}.npz", npz(good.arrays | {"cls": good.arrays["cls"].astype(number)})
        dtype = getattr(torch, number)
        yield f"int_{number}.pth", pth(good.state | {"cls_token": good.state["cls_token"].to(dtype)})


@kind
def tensors(good: Good, folder: Path) -> Files:
    state, members, name = good.state, good.members, "blocks.0.mlp.fc1.weight"
    odd = {
        "expanded": torch.zeros(1).expand(10**12), "expanded_square": torch.zeros(1).expand(32, 10**11),
        "expanded_twice": torch.zeros(9).as_strided((32, 10**8), (0, 0)), "sparse": torch.eye(32).to_sparse(),
        "meta": torch.empty(32, 32, device="meta"), "float8": torch.zeros(32, 32).to(torch.float8_e4m3fn),
    }  # fmt: skip
    for text, value in odd.items():
        yield f"{text}.pth", pth(state | {name: value})
    for n, value in enumerate(([state], {}, torch.zeros(2), {"x": 5}, torch.nn.Linear(2, 2))):
        yield f"no_table{n}.pth", pth(value)
    flat = torch.zeros(1536 * 512)  # 3 MB that would be a model of 380 MB
    large = {n: [16 * s if s in (32, 96) else s for s in t.shape] for n, t in state.items()}
    views = {n: flat[: np.prod(shape)].view(shape) for n, shape in large.items()}
    blocks = {n[9:]: view for n, view in views.items() if n.startswith("blocks.0.")}
    yield "views.pth", pth(views | {f"blocks.{i}.{n}": view for i in range(60) for n, view in blocks.items()})
    calls = {
        "slow": b"})" + b"q\0h\0\x86" * 60 + b"K\1s.",
        "zeros": b"cbuiltins\nbytearray\nJ\0\0\0\x60\x85R.",
    }
    for text, code in calls.items():
        yield f"{text}.pth", zipped(members | {"a/data.pkl": b"\x80\2" + code})
    for record in (n for n in members if n.startswith("a/data/")):
        yield f"short_{record[7:]}.pth", zipped(members | {record: members[record][:4]})


@kind
def cards(good: Good, folder: Path) -> Files:
    big, huge = 2**31, 10**400
    layouts = ("x", "official", "timm", "hf", "torchvision", "official-bit", "big_vision-bit", "timm-bit")
    configs: list[dict[str, Any]] = [
        {"width": big, "hidden": big}, {"depth": 10**9}, {"image_size": [2**24] * 2}, {"classes": big},
        {"image_size": [big] * 2, "patch": 1}, {"image_size": [big] * 2, "patch": 1, "positions": "relative"},
        {"classes": big, "representation": big}, {"patch": big, "image_size": [big] * 2}, {"norm_eps": huge},
        {"stem": {"blocks": [10**9]}, "image_size": [64, 64]}, {"stem": True}, {"width": huge}, {"depth": -1},
        {"image_size": [32]}, {"image_size": "32"}, {"gelu": ["erf"]}, {"unknown": 1}, {"layer_scale": True},
    ]  # fmt: skip
    told: list[Any] = [
        "{", "[]", "null", "[" * 10**5, "{}", {"version": 9}, {"kind": []}, {"labels": 5}, {"config": []},
        {"labels": ["a"] * 4}, {"preprocessing": {"mean": ["a"]}}, {"preprocessing": {"mean": [huge]}},
        {"kind": "ResNet", "config": {"blocks": [10**9]}}, {"kind": "ResNet", "config": {"width": 2**30}},
        *({"layout": layout, "kind": "ResNet", "config": {}} for layout in layouts),
        *({"layout": layout} for layout in layouts),
    ]  # fmt: skip
    yield "width.safetensors", carded(good, width=4096)
    head, body = parts(good.own)
    yield "name.safetensors", safe(js(head).replace(b"class_token", b"\\u001b[2J" * 10**4), body)
    for n, config in enumerate(configs):
        yield f"config{n}.safetensors", carded(good, **config)
    for n, card in enumerate(told):
        yield f"card{n}.safetensors", carded(good, card)
    none, empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, npy("(10000, 0)", b"")
    many = {f"blocks.{i}.attn.proj.weight": none for i in range(1, 99_000)}
    for text, data in (("blocks", safetensors.torch.save(good.state)), ("card", carded(good, depth=99_000))):
        yield f"layers_{text}.safetensors", safe(many | parts(data)[0], parts(data)[1])
    for text, name in (("stacked", "/x{}"), ("blocks", "_{}/x")):
        more = {f"Transformer/encoderblock{name.format(n)}.npy": empty for n in range(1, 10_000)}
        yield f"layers_{text}.npz", zipped(unzipped(good.npz) | more)


@kind
def settings(good: Good, folder: Path) -> Files:
    huge, nan, three = 10**400, float("nan"), ["0", "1", "2"]
    wrong: dict[str, list[Any]] = {
        "image_size": ["32", 3.5, [1, 2, 3], 10**9], "num_attention_heads": [{}, 1e999, 0, None, huge],
        "hidden_act": [[], "relu"], "layer_norm_eps": [[], "x", huge, nan], "model_type": [[], "bert"],
        "id2label": [5, three, None], "image_mean": [5, "abc", [None] * 3, [huge] * 3], "resample": [[]],
    }  # fmt: skip
    for field, values in wrong.items():
        file = f"preprocessor_{CONFIG}" if field in ("image_mean", "resample") else CONFIG
        for n, value in enumerate(values):
            yield f"{field}{n}", good.hf | {file: js(json.loads(good.hf[file]) | {field: value})}
    for name in (MODEL, CONFIG):
        (folder / f"pipe_{name}").mkdir()
        os.mkfifo(folder / f"pipe_{name}" / name)
        yield f"pipe_{name}", {MODEL: good.hf[MODEL]} if name == CONFIG else {}
    yield "empty", {}


@kind
def folders(good: Good, folder: Path) -> Files:
    names, outside = list(parts(good.hf[MODEL])[0]), folder / "elsewhere" / MODEL
    yield "elsewhere", good.hf | {CONFIG: b""}
    beside = f"../elsewhere/{MODEL}"
    for n, shard in enumerate((beside, str(outside), f"x/../{beside}", "..", "/dev/zero", "m\0", "\ud800")):
        yield f"{'out' if n < 5 else 'name'}{n}", {INDEX: js({"weight_map": dict.fromkeys(names, shard)})}
    for n, where in enumerate((None, [], 5, {"a": 5}, {"a": ["b"]})):
        yield f"map{n}", {INDEX: js({"weight_map": where})}
    for n, text in enumerate((b"", b"{", b"[]", b"\xff\xfe", bytes(100))):
        yield f"config{n}", good.hf | {CONFIG: text}
        yield f"index{n}", {INDEX: text}
    whole = {INDEX: js({"weight_map": dict.fromkeys(names, "shard")})}
    links = {"shard": (outside, whole), MODEL: (outside, {}), CONFIG: ("/dev/zero", {MODEL: good.hf[MODEL]})}
    for name, (target, files) in links.items():
        (folder / f"out_{name}").mkdir()
        (folder / f"out_{name}" / name).symlink_to(target)
        yield f"out_{name}", files


# --- the tests


def make_good(folder: Path, canary: Path) -> Good:
    folder.mkdir()
    model = vitkit.build("ViT-Ti/16", seed=0, **SIZES)
    paths = [folder / name for name in SOUND]
    for path in paths:
        vitkit.save(model, path, format="timm" if path.suffix == ".pth" else None)
    head, body = parts((folder / "hf" / MODEL).read_bytes())
    del head["__metadata__"]  # as transformers saves it
    (folder / "hf" / MODEL).write_bytes(safe(head, body))
    own, npz, pth = (path.read_bytes() for path in paths[:3])
    hf = {path.name: path.read_bytes() for path in paths[3].iterdir()}
    members = {f"a/{name.partition('/')[2]}": data for name, data in unzipped(pth).items()}
    state, arrays = torch.load(paths[2], weights_only=True), dict(np.load(paths[1]))
    return Good(own, npz, pth, hf, state, arrays, members, canary)


def write(good: Good, folder: Path, kind: str) -> Iterator[str]:
    folder.mkdir(parents=True)
    for name, content in KINDS[kind](good, folder):
        if isinstance(content, dict):
            (folder / name).mkdir(exist_ok=True)
        for inner, data in content.items() if isinstance(content, dict) else [("", content)]:
            (folder / name / inner).write_bytes(data)
        yield str(folder / name)


def load_all(good: list[str], paths: list[str], driver: str = DRIVER) -> dict[str, dict[str, Any]]:
    """What became of each file; a process that dies at one is started again behind it."""
    results: dict[str, dict[str, Any]] = {}
    while left := [path for path in paths if path not in results]:
        told = json.dumps([good, left])
        done = subprocess.run([sys.executable, "-c", driver], input=told, capture_output=True, text=True)
        results |= dict(json.loads(line) for line in done.stdout.splitlines())
        assert set(good) <= set(results), done.stderr
        if dead := [path for path in left if path not in results][:1]:
            end = {
                "code": "",
                "error": f"ended the process with {done.returncode}",
                "message": done.stderr[-300:],
            }
            results[dead[0]] = end | {"events": [], "seconds": 99, "grown": 0}
    return results


@pytest.fixture(scope="module")
def outcome(tmp_path_factory) -> Iterator[dict[str, dict[str, Any]]]:
    """Every file, as kind/name, and what came of loading it."""
    root = tmp_path_factory.mktemp("hostile")
    good = make_good(root / "good", root / "canary")
    paths = [path for kind in KINDS for path in write(good, root / kind, kind)]
    results = load_all([str(root / "good" / name) for name in SOUND], paths)
    assert not good.canary.exists(), "a hostile file has run"
    yield {str(Path(path).relative_to(root)): told for path, told in results.items()}
    shutil.rmtree(root)


def complaints(name: str, told: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the way in which one file was refused."""
    due = "WeightsError" if name.partition("/")[0] in MISFITS else "UntrustedCheckpoint"
    if due not in told["error"]:
        yield f"{due} expected, found {told['error']}"
    if told["events"]:
        yield f"it did {', '.join(told['events'])}"
    if told["seconds"] > 5 or told["grown"] > 300:
        yield f"it took {told['seconds']:.1f} s and {told['grown']:.0f} MB"
    if len(told["message"]) > 2000 or re.search(r"[^\n\x20-\x7e\xa0-\ud7ff]", told["message"]):
        yield "the message is endless or holds control characters"
    for code, words in (reason for start, reason in REASONS.items() if name.startswith(start)):
        if told["code"] != code or words not in told["message"]:
            yield f"{code} with {words!r} expected, found {told['code']}"
    if not told["code"].startswith(("weights.", "model.", "request.", "data.", "file.")):
        yield f"{told['code']!r} is no code of a file"


@pytest.mark.parametrize("kind", KINDS)
def test_every_hostile_file_is_refused_at_once_and_runs_nothing(outcome, kind):
    files = {name: told for name, told in outcome.items() if name.startswith(f"{kind}/")}
    wrong = [f"{n}: {c}: {told['message'][:200]!r}" for n, told in files.items() for c in complaints(n, told)]
    assert files and not wrong, "\n".join(wrong)


def test_the_sound_files_that_the_hostile_ones_are_made_of_do_load(outcome):
    assert [outcome[f"good/{name}"]["error"] for name in SOUND] == ["loaded"] * len(SOUND)
    assert len(outcome) >= 80


LOOK, LOAD = "vitkit.weights.untrusted.pickle_error", "vitkit.weights.untrusted.restricted_load"
OFF = {  # what is in the place of a protection, as a line of the driver
    LOOK: "lambda archive, member: ''",
    LOAD: "lambda path: torch.load(path, map_location='cpu', weights_only=False)",
}


def unguarded(root: Path, proof: Path, kind: str, names: str, *off: str) -> dict[str, dict[str, Any]]:
    """Hostile files of a kind, and what comes of them where protections are switched off."""
    lines = ["import torch.jit, vitkit", f"sys.path.insert(0, {str(FAULTS)!r})", "from pathlib import Path"]
    lines += ["from switches import switch_off"]
    lines += [f"switch_off({target!r}, {OFF[target]}, Path({str(proof)!r}))" for target in off]
    good = make_good(root / "good", root / "canary")
    paths = [path for path in write(good, root / kind, kind) if re.fullmatch(names, Path(path).name)]
    driver = DRIVER.replace("import torch.jit, vitkit", "\n".join(lines))
    results = load_all([str(root / "good" / name) for name in SOUND], paths, driver)
    return {str(Path(path).relative_to(root)): results[path] for path in paths}


@pytest.mark.control("vitkit.weights.untrusted.pickle_error", "vitkit.weights.untrusted.restricted_load")
def test_control_hostile_pickles_run_where_nothing_guards(tmp_path, switched_off):
    seen = unguarded(tmp_path, switched_off.proof, "pickles", r".*\.pt", LOOK, LOAD)
    assert len(seen) == 2 * len(calls(tmp_path)) and (tmp_path / "canary").exists()
    assert all(any(c.startswith("it did") for c in complaints(name, told)) for name, told in seen.items())
    events = {event for told in seen.values() for event in told["events"]}
    assert {"os.system", "subprocess.Popen", "exec", "open"} <= events


@pytest.mark.control("vitkit.weights.untrusted.pickle_error")
@pytest.mark.slow
def test_control_without_a_look_at_a_pickle_it_takes_time_and_memory(tmp_path, switched_off):
    seen = unguarded(tmp_path, switched_off.proof, "tensors", r"(slow|zeros)\.pth", LOOK)
    assert len(seen) == 2, seen
    assert any("it took" in complaint for name, told in seen.items() for complaint in complaints(name, told))
