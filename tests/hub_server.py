"""A hub on loopback that speaks the real protocol to the real client, with faults on demand.

Two servers in threads: the hub (model info, resolve with redirect) and the host of large
files it sends to (range reads). Every file of at least `LFS_BYTES` is a large one, named
by SHA-256; the others are served by the hub itself and named by git's blob hash. Faults
are planted by file and used up; what was asked is recorded.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LFS_BYTES = 20_000
TOKEN = "hf_secretOfTheTests"
STALL_S = 600
"""Longer than any client has patience for: a stall ends with its hub."""

Fault = Callable[["_Handler", bytes, int], None]
"""Answers a GET in place of the server: handler, the bytes asked for, their offset."""


@dataclass
class Repo:
    """A repository: its commits in order, each a mapping of names to contents."""

    commits: list[tuple[str, Mapping[str, bytes]]] = field(default_factory=list)
    license: str = "apache-2.0"
    gate: str = ""
    """`token`: every token is let in; `licence`: no one is; `private`: hidden without one."""

    def push(self, files: Mapping[str, bytes]) -> str:
        """Adds a commit and returns its hash."""
        text = json.dumps([len(self.commits), sorted((n, hashlib.sha1(d).hexdigest())
                                                     for n, d in files.items())])  # fmt: skip
        commit = hashlib.sha1(text.encode()).hexdigest()
        self.commits.append((commit, dict(files)))
        return commit

    def at(self, revision: str) -> tuple[str, Mapping[str, bytes]] | None:
        """Returns the commit that a revision names."""
        if revision == "main":
            return self.commits[-1]
        return next((each for each in self.commits if each[0] == revision), None)


class MappedFile(mmap.mmap):
    """A large file's contents, read when they are asked for; hashed once.

    Attributes:
        etag: The hub's name of the contents.
    """

    etag: str

    @classmethod
    def open(cls, path: Path) -> MappedFile:
        """Maps a file."""
        with path.open("rb") as file:
            made = cls(file.fileno(), 0, access=mmap.ACCESS_READ)
        made.etag = hashlib.sha256(made).hexdigest()
        return made


class FakeHub:
    """The two servers.

    Attributes:
        repos: What there is, by `owner/name`.
        faults: By file name, what answers the next GETs in its place, first first; each is
            used once. The name `api` stands for the model's information.
        requests: `(method, host, name, range)` of every request; host is `hub` or `lfs`.
        leaked: Requests that brought a token to the host of large files.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        self.requests: list[tuple[str, str, str, str]] = []
        self.leaked: list[str] = []
        self.released = threading.Event()
        """Set at the end: stalled answers go home."""
        self.stalled = threading.Event()
        """Set when an answer has begun to stall."""
        self._servers = [_Server(self, kind) for kind in ("hub", "lfs")]

    def start(self) -> FakeHub:
        """Starts serving."""
        for server in self._servers:
            server.thread.start()
        return self

    def close(self) -> None:
        """Stops serving; the ports are closed afterwards."""
        self.released.set()
        for server in self._servers:
            server.shutdown()
            server.thread.join()
            server.server_close()

    @property
    def endpoint(self) -> str:
        """Address of the hub."""
        return self._servers[0].address

    @property
    def lfs_endpoint(self) -> str:
        """Address of the large files."""
        return self._servers[1].address

    def add(self, repo_id: str, folder: Path, **fields: Any) -> Repo:
        """Adds a repository with the files of a folder."""
        repo = self.repos[repo_id] = Repo(**fields)
        repo.push({
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*")) if path.is_file()
        })  # fmt: skip
        return repo

    def add_mapped(self, repo_id: str, folder: Path) -> Repo:
        """As `add`, for files too large to hold: they are read from the disk."""
        repo = self.repos[repo_id] = Repo()
        repo.push({
            path.name: MappedFile.open(path) if path.stat().st_size >= LFS_BYTES
            else path.read_bytes()
            for path in sorted(folder.iterdir())
        })  # fmt: skip
        return repo

    def bodies(self, name: str) -> list[str]:
        """Ranges of the GETs that asked for a large file's bytes."""
        return [said for method, host, asked, said in self.requests
                if (method, host, asked) == ("GET", "lfs", name)]  # fmt: skip


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: FakeHub, kind: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub, self.kind = hub, kind
        self.thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of clients that went away."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    whole: bytes = b""
    """All of the file that is asked for."""

    def log_message(self, format: str, *args: object) -> None:
        """Keeps the tests' output clean."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if self.server.kind == "lfs":
            self._serve_large(*path.removeprefix("/").split("/", 1))
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/revision/(.+))?", path):
            self._serve_info(match[1], match[2] or "main")
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._serve_file(*match.groups())
        else:
            self.refuse(404, "RepoNotFound")

    def _note(self, name: str) -> bool:
        """Records the request. Returns whether a fault answered it."""
        hub, said = self.server.hub, self.headers.get("Range", "")
        hub.requests.append((self.command, self.server.kind, name, said))
        if self.server.kind == "lfs" and self.headers.get("Authorization"):
            hub.leaked.append(name)
        return False

    def _repo_at(self, repo_id: str, revision: str):
        """Finds a commit as the real hub does, or refuses with its codes."""
        repo = self.server.hub.repos.get(repo_id)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token != TOKEN:
            return self.refuse(401, "", "Invalid credentials in Authorization header")
        if repo is None or (repo.gate == "private" and not token):
            return self.refuse(404 if token else 401, "RepoNotFound", "Repository not found")
        found = repo.at(revision)
        if found is None:
            return self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repo, *found

    def _serve_info(self, repo_id: str, revision: str) -> None:
        self._note("api")
        if self._fault("api", b"", 0) or (found := self._repo_at(repo_id, revision)) is None:
            return
        repo, commit, files = found
        siblings = []
        for name, data in files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": git_hash(data)}
            if is_large(data):
                entry["lfs"] = {"size": len(data), "sha256": etag_of(data), "pointerSize": 134}
            siblings.append(entry)
        self.send(200, json.dumps({
            "id": repo_id, "modelId": repo_id, "sha": commit, "private": False,
            "siblings": siblings,
            "gated": "manual" if repo.gate else False, "cardData": {"license": repo.license},
        }).encode(), {"Content-Type": "application/json"})  # fmt: skip

    def _serve_file(self, repo_id: str, revision: str, name: str) -> None:
        self._note(name)
        if (found := self._repo_at(repo_id, revision)) is None:
            return None
        repo, commit, files = found
        page = f"Access to model {repo_id} is restricted."
        if repo.gate == "licence" or (repo.gate == "token" and "Authorization" not in self.headers):
            return self.refuse(403 if "Authorization" in self.headers else 401, "GatedRepo", page)
        if name not in files:
            return self.refuse(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        data = files[name]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{git_hash(data)}"'}
        if not is_large(data):
            return self._send_part(name, data, headers)
        location = f"{self.server.hub.lfs_endpoint}/{etag_of(data)}/{name}"
        linked = {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{etag_of(data)}"'}
        return self.send(302, b"", headers | linked | {"Location": location})

    def _serve_large(self, etag: str, name: str) -> None:
        self._note(name)
        for repo in self.server.hub.repos.values():
            for _, files in repo.commits:
                if name in files and etag_of(files[name]) == etag:
                    return self._send_part(name, files[name], {"ETag": f'"{etag}"'})
        return self.refuse(404, "", "")

    def _send_part(self, name: str, data: bytes, headers: dict[str, str]) -> None:
        said = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start = int(said[1]) if said else 0
        stop = min(int(said[2]) + 1, len(data)) if said and said[2] else len(data)
        if start >= len(data) > 0:
            return self.refuse(416, "", "")
        self.whole = data
        part = memoryview(data)[start:stop] if isinstance(data, MappedFile) else data[start:stop]
        if self._fault(name, part, start):
            return None
        if said:
            headers = headers | {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
        return self.send(206 if said else 200, part, headers)

    def _fault(self, name: str, data: bytes, start: int) -> bool:
        faults = self.server.hub.faults[name]
        if self.command != "GET" or not faults:
            return False
        faults.pop(0)(self, data, start)
        return True

    def send(
        self, status: int, body: bytes, headers: Mapping[str, str], length: int | None = None
    ) -> None:
        """Sends an answer; with `length` the header promises another length than comes."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def refuse(
        self, status: int, code: str, message: str = "", headers: Mapping[str, str] = {}
    ) -> None:
        """Sends an error as the hub does: its code and words in headers."""
        said = {"X-Error-Code": code, "X-Error-Message": message}
        self.send(
            status,
            json.dumps({"error": message}).encode(),
            {**{name: value for name, value in said.items() if value}, **headers},
        )

    def part(self, data: bytes, start: int) -> tuple[int, dict[str, str]]:
        """Returns the status and headers of a good answer with these bytes."""
        if "Range" not in self.headers:
            return 200, {}
        return 206, {"Content-Range": f"bytes {start}-{start + len(data) - 1}/{start + len(data)}"}


def is_large(data: bytes) -> bool:
    """Whether the hub keeps the contents with the large files."""
    return len(data) >= LFS_BYTES


def git_hash(data: bytes) -> str:
    """Git's name of contents; of a mapped file, of the pointer that git has in its place."""
    if isinstance(data, MappedFile):
        data = data.etag.encode()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def etag_of(data: bytes) -> str:
    """The hub's name of contents."""
    if isinstance(data, MappedFile):
        return data.etag
    return hashlib.sha256(data).hexdigest() if is_large(data) else git_hash(data)


# -- faults -------------------------------------------------------------------------------


def cut(at: float = 0.5) -> Fault:
    """The connection ends when this share of the bytes has come."""

    def answer(handler: _Handler, data: bytes, start: int) -> None:
        status, headers = handler.part(data, start)
        handler.send(status, data[: int(at * len(data))], headers, len(data))
        handler.wfile.flush()
        handler.close_connection = True

    return answer


def wrong_bytes(handler: _Handler, data: bytes, start: int) -> None:
    """As many bytes as there should be, and one of them another."""
    status, headers = handler.part(data, start)
    middle = len(data) // 2
    changed = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    handler.send(status, changed, headers)


def empty(handler: _Handler, data: bytes, start: int) -> None:
    """Success, and not a byte."""
    handler.send(200, b"", {})


def ignores_range(handler: _Handler, data: bytes, start: int) -> None:
    """All of the file from its beginning, whatever part was asked for."""
    handler.send(200, handler.whole, {})


def stall(at: float = 0.5) -> Fault:
    """Nothing more comes after this share of the bytes, and the connection stays open."""

    def answer(handler: _Handler, data: bytes, start: int) -> None:
        status, headers = handler.part(data, start)
        handler.send(status, data[: int(at * len(data))], headers, len(data) or 1)
        handler.wfile.flush()
        handler.server.hub.stalled.set()
        handler.server.hub.released.wait(STALL_S)
        handler.close_connection = True

    return answer


def status(code: int, **headers: str) -> Fault:
    """An error status, with headers whose underscores are dashes."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler, data, start: handler.refuse(code, "", "", named)
