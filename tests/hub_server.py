"""A server that speaks the protocol of the Hugging Face Hub, as far as huggingface_hub's own client uses it.

Repositories with branches, tags and commits, private and gated ones, downloads with ETags and redirects to a
store of large files, and uploads through preupload, LFS and one commit. Writing needs the token.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

LARGE = (".safetensors", ".bin")  # kept as LFS files
REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"


@dataclass
class Repo:
    private: bool = False
    gated: bool = False
    refs: dict[str, str] = field(default_factory=dict)  # branches and tags
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, files: dict[str, bytes], message: str = "", branch: str = "main") -> str:
        content = [(name, hashlib.sha256(data).hexdigest()) for name, data in sorted(files.items())]
        oid = hashlib.sha1(json.dumps([content, len(self.commits)]).encode()).hexdigest()
        self.commits[oid], self.refs[branch] = files, oid
        self.messages.append(message)
        return oid

    def resolve(self, revision: str) -> str | None:
        return self.refs.get(revision) or (revision if revision in self.commits else None)

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[self.refs["main"]]


class Answer(Exception):
    """What a request ends with."""

    def __init__(self, status: int, content: Any = b"", **headers: str):
        self.status, self.headers = status, {k.replace("_", "-"): v for k, v in headers.items()}
        self.content = content if isinstance(content, bytes) else json.dumps(content).encode()


class Hub(ThreadingHTTPServer):
    """The server and all it holds; `with Hub() as hub:` starts it."""

    daemon_threads = True

    def __init__(self, token: str = "hf_secret") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.token, self.repos, self.store = token, {}, {}
        self.repos: dict[str, Repo]
        self.store: dict[str, bytes]  # large files by their SHA-256
        self.requests: list[tuple[str, str]] = []
        self.fails: set[str] = set()  # paths that answer with an error, by prefix

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def other_url(self) -> str:
        """The same server under another name, as the real one keeps large files on other hosts."""
        return f"http://localhost:{self.server_port}"

    def add(self, name: str, files: dict[str, bytes], **options: bool) -> Repo:
        repo = self.repos.setdefault(name, Repo(**options))
        repo.commit(files)
        return repo

    def __enter__(self) -> "Hub":
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *arguments: object) -> None:
        pass

    def answer(self) -> None:
        body = self.body()
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        self.server.requests.append((self.command, path))
        method = "GET" if self.command == "HEAD" else self.command
        try:
            if any(path.startswith(prefix) for prefix in self.server.fails):
                raise Answer(400, {"error": "switched off"})
            for wanted, pattern, serve in ROUTES:
                if method == wanted and (match := re.fullmatch(pattern, path)):
                    serve(
                        self, body=body, query=query, **{k: unquote(v) for k, v in match.groupdict().items()}
                    )
            raise Answer(404, {"error": f"no route for {method} {path}"})
        except Answer as answer:
            self.send_response(answer.status)
            for name, value in ({"Content-Length": str(len(answer.content))} | answer.headers).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.content)

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    @property
    def user(self) -> bool:
        given = self.headers.get("Authorization")
        if given and given != f"Bearer {self.server.token}":
            message = "Invalid credentials in Authorization header"
            raise Answer(401, {"error": message}, X_Error_Message=message)
        return bool(given)

    def writer(self) -> None:
        if not self.user:
            raise Answer(401, {"error": "Invalid username or password."})

    def repo(self, name: str) -> Repo:
        repo, user = self.server.repos.get(name), self.user
        if repo is None or (repo.private and not user):
            raise Answer(404 if user else 401, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        return repo

    def at(self, name: str, revision: str) -> tuple[Repo, str]:
        repo = self.repo(name)
        commit = repo.resolve(revision)
        if commit is None:
            raise Answer(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
        return repo, commit

    # reading

    def whoami(self, **_: Any) -> None:
        self.writer()
        raise Answer(200, {"type": "user", "name": "me", "orgs": []})

    def models(self, query: dict[str, list[str]], **_: Any) -> None:
        names = [name for name in self.server.repos if name.startswith(query["author"][0] + "/")]
        raise Answer(200, [{"id": name, "modelId": name} for name in names])

    def info(self, repo: str, revision: str = "main", **_: Any) -> None:
        found, commit = self.at(repo, revision)
        tags: list[str] = []
        if readme := found.commits[commit].get("README.md"):
            header = yaml.safe_load(readme.decode().split("---")[1]) or {}
            tags = [f"license:{header['license']}"] if "license" in header else []
        siblings = [{"rfilename": name} for name in found.commits[commit]]
        facts = {"id": repo, "modelId": repo, "sha": commit, "private": found.private, "gated": found.gated,
                 "tags": tags, "siblings": siblings, "disabled": False}  # fmt: skip
        raise Answer(200, facts)

    def refs(self, repo: str, **_: Any) -> None:
        found = self.repo(repo)
        branches = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": c} for n, c in found.refs.items()]
        raise Answer(200, {"branches": branches, "tags": [], "converts": []})

    def resolve(self, repo: str, revision: str, file: str, **_: Any) -> None:
        found, commit = self.at(repo, revision)
        if found.gated:
            raise Answer(403 if self.user else 401, X_Error_Code="GatedRepo", X_Error_Message="gated")
        content = found.commits[commit].get(file)
        if content is None:
            raise Answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        if file.endswith(LARGE):
            oid = hashlib.sha256(content).hexdigest()
            self.server.store[oid] = content
            raise Answer(
                302, Location=f"{self.server.other_url}/store/{oid}", X_Repo_Commit=commit,
                X_Linked_Etag=f'"{oid}"', X_Linked_Size=str(len(content)),
            )  # fmt: skip
        raise Answer(200, content, ETag=f'"{git_oid(content)}"', X_Repo_Commit=commit)

    def large(self, oid: str, **_: Any) -> None:
        raise Answer(200, self.server.store[oid], ETag=f'"{oid}"')

    # writing

    def create(self, body: bytes, **_: Any) -> None:
        self.writer()
        request = json.loads(body)
        name = f"{request.get('organization') or 'me'}/{request['name']}"
        if name in self.server.repos:
            raise Answer(409, {"url": f"{self.server.url}/{name}", "error": "You already created this model"})
        private = request.get("visibility") == "private" or bool(request.get("private"))
        self.server.repos[name] = repo = Repo(private=private)
        repo.commit({".gitattributes": b"*.safetensors filter=lfs"}, "initial commit")
        raise Answer(200, {"url": f"{self.server.url}/{name}", "name": name})

    def validate(self, body: bytes, **_: Any) -> None:
        try:
            header = yaml.safe_load(json.loads(body)["content"].split("---")[1])
        except yaml.YAMLError as error:
            raise Answer(400, {"errors": [{"message": str(error)}], "warnings": []}) from None
        if header.get("license", "mit") not in ("mit", "apache-2.0", "other"):
            raise Answer(400, {"errors": [{"message": '"license" must be one of mit, ...'}], "warnings": []})
        raise Answer(200, {"errors": [], "warnings": []})

    def preupload(self, repo: str, body: bytes, **_: Any) -> None:
        self.writer()
        files = self.repo(repo).files
        rows = []
        for file in json.loads(body)["files"]:
            name, old = file["path"], files.get(file["path"])
            mode = "lfs" if name.endswith(LARGE) else "regular"
            oid = None
            if old is not None:
                oid = hashlib.sha256(old).hexdigest() if mode == "lfs" else git_oid(old)
            rows.append({"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        raise Answer(200, {"files": rows})

    def batch(self, body: bytes, **_: Any) -> None:
        self.writer()
        objects = []
        for item in json.loads(body)["objects"]:
            upload = {"href": f"{self.server.url}/store/{item['oid']}"}
            new = {} if item["oid"] in self.server.store else {"actions": {"upload": upload}}
            objects.append({"oid": item["oid"], "size": item["size"], **new})
        raise Answer(200, {"transfer": "basic", "objects": objects})

    def keep(self, oid: str, body: bytes, **_: Any) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            raise Answer(422, {"error": "the content has another SHA-256"})
        self.server.store[oid] = body
        raise Answer(200)

    def commit(self, repo: str, revision: str, body: bytes, **_: Any) -> None:
        self.writer()
        found, parent = self.at(repo, revision)
        files, message = dict(found.commits[parent]), ""
        for line in body.splitlines():
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "header":
                message = value["summary"]
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.server.store[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
        oid = found.commit(files, message, revision)
        url = f"{self.server.url}/{repo}/commit/{oid}"
        raise Answer(200, {"commitUrl": url, "commitOid": oid, "success": True})


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


ROUTES = [
    ("GET", "/api/whoami-v2", Handler.whoami),
    ("GET", "/api/models", Handler.models),
    ("GET", f"/api/models/{REPO}", Handler.info),
    ("GET", f"/api/models/{REPO}/revision/(?P<revision>[^/]+)", Handler.info),
    ("GET", f"/api/models/{REPO}/refs", Handler.refs),
    ("GET", f"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", Handler.resolve),
    ("GET", "/store/(?P<oid>[0-9a-f]+)", Handler.large),
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate),
    ("POST", f"/api/models/{REPO}/preupload/(?P<revision>[^/]+)", Handler.preupload),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", "/store/(?P<oid>[0-9a-f]+)", Handler.keep),
    ("POST", f"/api/models/{REPO}/commit/(?P<revision>[^/]+)", Handler.commit),
]
