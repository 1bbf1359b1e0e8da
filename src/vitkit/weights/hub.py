"""The Hugging Face Hub: models named hf:owner/name@revision, their files in its cache, and uploads.

huggingface_hub decides where files are kept, which token is sent and what a proxy is, as for other libraries:
HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN and `hf auth login` have their usual meaning.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitkit.errors import Error, WeightsError, did_you_mean
from vitkit.models.card import Origin

PREFIX = "hf:"
INDEX = ".index.json"
WRITTEN = (  # by transformers, timm and vitkit
    "model.safetensors",
    f"model.safetensors{INDEX}",
    "pytorch_model.bin",
    f"pytorch_model.bin{INDEX}",
)
OPEN_CLIP = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
WEIGHTS = (*WRITTEN, *OPEN_CLIP)  # in a folder or repository; the first that exists is read
SIDE_FILES = ("config.json", "preprocessor_config.json")
OPEN_CLIP_FILES = ("open_clip_config.json",)
REPO = re.compile(r"(?!.*(--|\.\.))\w[\w.-]*/\w[\w.-]*(?<![.-])(?<!\.git)", re.ASCII)
REVISION = re.compile(r"(?!.*\.\.)\w[\w./-]*", re.ASCII)
PASSWORD = re.compile(r"//[^/@]*@")  # with the name before it
SHARD = re.compile(r"-\d{5}-of-(\d{5})")
FAMILIES = ("vit", "deit", "flexivit", "eva02", "resnetv2", "test_vit")  # timm architectures that may fit
VIT_TYPES = ("vit", "vit_mae", "deit")  # of transformers, with the array names of its ViT
MODEL_TYPES = (
    *VIT_TYPES, "dinov2", "dinov2_with_registers", "dinov3_vit",
    "clip", "clip_vision_model", "siglip", "siglip_vision_model", "eomt", "yolos", "rf_detr",
)  # fmt: skip
SHOWN = 12  # files of a repository in a message
NAMES = 500  # models of an owner that a mistyped name is compared with
LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


@dataclass(frozen=True)
class HubName:
    """A model repository and the branch, tag or commit of it."""

    repo: str
    revision: str = "main"

    def __str__(self) -> str:
        return f"{PREFIX}{self.repo}" + (f"@{self.revision}" if self.revision != "main" else "")


@dataclass(frozen=True)
class Listing:
    """The files of a repository at one commit."""

    commit: str
    files: tuple[str, ...]
    licence: str


def is_hub(source: object) -> bool:
    return isinstance(source, str) and source.startswith(PREFIX)


def parse(source: str) -> HubName:
    """hf:owner/name, or with @ and a branch, tag or commit; also hf://owner/name."""
    repo, at, revision = source.removeprefix(PREFIX).removeprefix("//").partition("@")
    check_repo(repo, source)
    if at and not REVISION.fullmatch(revision):
        raise WeightsError(
            f"{source!r}: {revision!r} is not a branch, tag or commit; expected hf:owner/name@revision",
            code="request.value",
        )
    return HubName(repo, revision) if at else HubName(repo)


def check_repo(repo: str, given: str = "") -> None:
    """Refuse what cannot be the name of a repository."""
    if not REPO.fullmatch(repo) or len(repo) > 96:
        raise WeightsError(
            f"{given or repo!r}: {repo!r} is not the name of a model on the Hub; expected owner/name, of "
            "letters, digits, '-', '_' and '.'",
            code="request.value",
        )


def library() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError:
        raise Error(
            'the Hugging Face Hub needs huggingface_hub: pip install "vitkit[hub]"',
            code="request.extra-missing",
        ) from None
    return huggingface_hub


def client() -> Any:
    """huggingface_hub's client, for the server that HF_ENDPOINT names now; it reads that only on import."""
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/")
    return library().HfApi(endpoint=endpoint or None, library_name="vitkit")


def server_name() -> str:
    """The address of the server for messages, without a password that HF_ENDPOINT may hold."""
    return PASSWORD.sub("//", str(client().endpoint))


@contextmanager
def hub_errors(name: str, *, writing: bool = False) -> Iterator[None]:
    """Turn the errors of huggingface_hub into ours, which quote no header and so no token."""
    errors = library().errors
    transport = errors.HfHubHTTPError.__bases__[0]  # of the HTTP library, which differs between versions
    server = server_name()
    try:
        yield
    except errors.GatedRepoError:
        terms = f"accept the terms on {server}/{name.removeprefix(PREFIX).partition('@')[0]}"
        message = f"{name}: access is restricted; {terms}, and {LOGIN}"
        raise WeightsError(message, code="network.refused") from None
    except errors.RepositoryNotFoundError:
        reason = "this account may not write to it" if writing else "it is private"
        message = f"{name}: {server} has no such model, or {reason}; check the name, or {LOGIN}"
        raise WeightsError(f"{message};{nearest(name)}".rstrip(";"), code="weights.not-found") from None
    except errors.RevisionNotFoundError:
        repo, _, revision = name.partition("@")
        message = (
            f"{name}: {repo} has no branch, tag or commit {revision!r};{nearest_revision(repo, revision)}"
        )
        raise WeightsError(message.rstrip(";"), code="weights.not-found") from None
    except errors.LocalTokenNotFoundError:
        raise WeightsError(f"{name}: no token for {server}; {LOGIN}", code="network.refused") from None
    except errors.HfHubHTTPError as error:
        raise refused(name, server, error, writing=writing) from None
    except errors.OfflineModeIsEnabled:
        what = "nothing can be uploaded" if writing else "the model is not in the cache of huggingface_hub"
        message = f"{name}: HF_HUB_OFFLINE is set, and {what}"
        raise WeightsError(message, code="network.unreachable") from None
    except (transport, ConnectionError, TimeoutError, errors.EntryNotFoundError) as error:
        message = (
            f"{name}: {server} does not answer as the Hub does ({type(error).__name__}); try again later"
        )
        raise WeightsError(message, code="network.unreachable") from None


def refused(name: str, server: str, error: Any, *, writing: bool) -> WeightsError:
    """The error of an answer with another HTTP status."""
    status = getattr(error.response, "status_code", 0)
    if status >= 500:
        return WeightsError(f"{name}: {server} fails (HTTP {status})", code="network.unreachable")
    remedy = "" if status not in (401, 403) else f": {LOGIN}"
    if remedy and writing:
        remedy += " with a token that may write to this repository"
    return WeightsError(f"{name}: {server} refuses this (HTTP {status}){remedy}", code="network.refused")


def nearest(name: str) -> str:
    """A hint with the most similar model of the same owner; empty if none is, or nothing is known."""
    repo = name.removeprefix(PREFIX).partition("@")[0]
    with suppress(Exception):  # the answer about the repository is what matters
        known = [model.id for model in client().list_models(author=repo.partition("/")[0], limit=NAMES)]
        return did_you_mean(repo, known, cutoff=0.7).replace("mean ", f"mean {PREFIX}")
    return ""


def nearest_revision(repo: str, revision: str) -> str:
    with suppress(Exception):
        refs = client().list_repo_refs(repo.removeprefix(PREFIX))
        return did_you_mean(revision, [ref.name for ref in (*refs.branches, *refs.tags)])
    return ""


def look_up(name: HubName) -> Listing:
    """The commit and the files of a repository, from the server."""
    with hub_errors(str(name)):
        info = client().model_info(name.repo, revision=name.revision)
    files = tuple(file.rfilename for file in info.siblings or ())
    licences = [tag.removeprefix("license:") for tag in info.tags or () if tag.startswith("license:")]
    return Listing(info.sha, files, licences[0] if licences else "")


def weight_files(files: Sequence[str], name: HubName) -> list[str]:
    """The files to download, small ones first: the JSON files, then the weights with their shards."""
    weights = next((file for file in WEIGHTS if file in files), None)
    if weights is None:
        shown = ", ".join(files[:SHOWN]) + (f" and {len(files) - SHOWN} more" if len(files) > SHOWN else "")
        raise WeightsError(
            f"{name}: no weights that vitkit reads ({', '.join(WEIGHTS)}); it has {shown or 'no files'}",
            code="weights.not-found",
        )
    return [*(file for file in described_by(weights) if file in files), weights, *shards(weights, files)]


def described_by(weights: str) -> tuple[str, ...]:
    """The JSON files that describe a weight file, by its name: open_clip's are beside those of others."""
    return OPEN_CLIP_FILES if weights in OPEN_CLIP else SIDE_FILES


def shards(weights: str, files: Sequence[str]) -> list[str]:
    """The shards that belong to an index; none for a single file."""
    if not weights.endswith(INDEX):
        return []
    stem, _, ending = weights.removesuffix(INDEX).rpartition(".")
    return sorted(f for f in files if f.startswith(stem) and SHARD.fullmatch(f[len(stem) : -len(ending) - 1]))


def in_cache(name: HubName, file: str) -> str | object | None:
    """The path of a file in the cache, another value if the repository is known to lack it, or None."""
    return library().try_to_load_from_cache(name.repo, file, revision=name.revision)


def cached(name: HubName) -> Path | None:
    """The folder of a model that is completely in the cache; no server is asked.

    Other libraries may have cached the weights alone. How images are preprocessed is not guessed then.
    """
    for weights in WEIGHTS:
        path = in_cache(name, weights)
        if not isinstance(path, str) or not described(name, weights):
            continue
        folder = Path(path).parent
        parts = shards(weights, [file.name for file in folder.iterdir()])
        expected = (
            int(match[1]) if parts and (match := SHARD.search(parts[0])) else int(weights.endswith(INDEX))
        )
        return folder if len(parts) == expected else None
    return None


def described(name: HubName, weights: str) -> bool:
    """Whether the cache has the JSON files of these weights, or knows that the repository has none."""
    config, *others = (in_cache(name, file) for file in described_by(weights))
    of_timm = isinstance(config, str) and "architecture" in read_config(Path(config))
    return config is not None and (of_timm or None not in others)


def listing_or_cached(name: HubName) -> Listing | Path:
    """What the server says; where it cannot be reached, the folder in the cache."""
    try:
        listing = look_up(name)
    except WeightsError as error:
        if error.code == "network.unreachable" and (folder := cached(name)):
            return folder
        raise
    weight_files(listing.files, name)
    return listing


def check_obtainable(source: str) -> None:
    """Refuse a model that is neither in the cache nor on the server, without downloading it."""
    listing_or_cached(parse(source))


def fetch(source: str) -> tuple[Path, Origin]:
    """The folder with a model's files, downloaded where they are not in the cache, and its origin."""
    name = parse(source)
    known = listing_or_cached(name)
    if isinstance(known, Path):
        return known, Origin(source=f"{PREFIX}{name.repo}@{known.name}")
    first, *others = weight_files(known.files, name)
    with hub_errors(str(name)):
        hub = client()
        # asked for by its branch, which the cache remembers for later; all others by the same commit
        path = Path(hub.hf_hub_download(name.repo, first, revision=name.revision))
        if first in (SIDE_FILES[0], *OPEN_CLIP_FILES):
            check_supported(name, path)
        at_commit = HubName(name.repo, path.parent.name)
        for file in others:
            hub.hf_hub_download(name.repo, file, revision=at_commit.revision)
        weights = next(file for file in WEIGHTS if file in known.files)
        for file in described_by(weights):
            if in_cache(at_commit, file) is None:  # the cache remembers that it does not exist
                with suppress(library().errors.EntryNotFoundError):
                    hub.hf_hub_download(name.repo, file, revision=at_commit.revision)
    origin = Origin(source=f"{PREFIX}{name.repo}@{path.parent.name}", licence=known.licence)
    return path.parent, origin


def fetch_file(source: str, file: str) -> Path | None:
    """One more file of a repository, downloaded where it is not in the cache; None if it has no such file."""
    name = parse(source)
    path = in_cache(name, file)
    if isinstance(path, str):
        return Path(path)
    with hub_errors(str(name)):
        try:
            return Path(client().hf_hub_download(name.repo, file, revision=name.revision))
        except library().errors.LocalEntryNotFoundError:  # the server cannot be asked
            raise
        except library().errors.EntryNotFoundError:
            return None


def read_config(path: Path) -> dict[str, Any]:
    """The table of a config.json; empty for anything else, which the reader of the folder refuses."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError, OSError):
        return {}
    return content if isinstance(content, dict) else {}


def check_supported(name: HubName, path: Path) -> None:
    """Refuse an architecture that vitkit does not have before its weights are downloaded."""
    content = read_config(path)
    kind, architecture = content.get("model_type"), content.get("architecture")
    fits = kind in MODEL_TYPES if isinstance(kind, str) else True
    if isinstance(architecture, str):  # a timm repository
        kind, fits = architecture, architecture.startswith(FAMILIES)
    if path.name in OPEN_CLIP_FILES:
        kind, fits = open_clip_tower(content)
    if not fits:
        raise WeightsError(
            f"{name}: its model is a {str(kind)[:60]}; vitkit reads ViTs, hybrids and BiT ResNets only",
            code="weights.unsupported",
        )


def open_clip_tower(content: dict[str, Any]) -> tuple[str, bool]:
    """The image tower of open_clip_config.json, and whether it may be a ViT; the reader checks the rest."""
    model = content.get("model_cfg")
    vision = model.get("vision_cfg") if isinstance(model, dict) else None
    vision = vision if isinstance(vision, dict) else {}
    if isinstance(trunk := vision.get("timm_model_name"), str):
        return trunk, trunk.startswith(FAMILIES)
    return "CLIP ResNet", not isinstance(vision.get("layers"), list)


def check_login(repo: str) -> None:
    """Refuse to write without a valid token."""
    with hub_errors(repo, writing=True):
        client().whoami()


def upload(repo: str, paths: Sequence[Path], *, private: bool, message: str) -> tuple[str, str]:
    """Make the repository if it is not there, and replace its model in one commit; returns URL and commit.

    Files of an earlier push in another format are deleted in this commit, since libraries would read them.
    """
    hub, names = client(), {path.name for path in paths}
    with hub_errors(repo, writing=True):
        url = hub.create_repo(repo, private=private or None, exist_ok=True)
        info = hub.model_info(repo)
        if private and not info.private:
            raise WeightsError(
                f"{repo} exists and is public; make it private in its settings, or push without --private",
                code="request.conflict",
            )
        files = [file.rfilename for file in info.siblings or ()]
        old = {*WRITTEN, *SIDE_FILES, *(shard for weights in WRITTEN for shard in shards(weights, files))}
        add, delete = library().CommitOperationAdd, library().CommitOperationDelete
        changes = [add(path.name, path) for path in paths]
        changes += [delete(file) for file in files if file in old - names]
        try:
            done = hub.create_commit(repo, changes, commit_message=message)
        except RuntimeError as error:  # of a file; nothing is committed
            message = f"{repo}: the upload failed ({error}); nothing was changed, so push again"
            raise WeightsError(message, code="network.unreachable") from None
        except ValueError as error:
            if isinstance(error, library().errors.HfHubHTTPError):
                raise
            reason = " ".join(str(error).split())[:300]
            raise WeightsError(
                f"{repo}: the Hub refuses the model card: {reason}", code="request.value"
            ) from None
    return PASSWORD.sub("//", str(url)), str(done.oid)
