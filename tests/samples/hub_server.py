"""A model hub on 127.0.0.1, for the real client of Hugging Face: repositories, commits and large
files (Git LFS), kept in memory.

It has what uploads of folders and downloads need: creating a repository, the question which files
are large, uploads of large files by hash, commits, listings, and files by revision, with redirects,
ETags and ranges. The large files are stored once, by their hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".bin", ".pt")  # as in the .gitattributes of the real hub
POINTER_NBYTES = 134


@dataclass
class Repo:
    """A repository: files by path for each commit, newest last.

    Attributes:
        commits: (hash, files) of each; a file is its bytes, or the hash of a large one.
    """

    commits: list[tuple[str, dict[str, bytes | str]]] = field(default_factory=list)

    def commit(self, files: dict[str, bytes | str]) -> str:
        oid = hashlib.sha1(repr((len(self.commits), sorted(files.items()))).encode()).hexdigest()
        self.commits.append((oid, files))
        return oid

    def at(self, revision: str) -> tuple[str, dict[str, bytes | str]] | None:
        if revision == "main":
            return self.commits[-1]
        return next((found for found in self.commits if found[0] == revision), None)


class Hub(ThreadingHTTPServer):
    """The server.

    Attributes:
        repos: by name, such as "user/model".
        large: the large files, by SHA-256.
        uploaded: hashes of large files, in the order in which their bytes arrived.
        sent: (path, bytes) of each answer with a file.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, Repo] = {}
        self.large: dict[str, bytes] = {}
        self.uploaded: list[str] = []
        self.sent: list[tuple[str, int]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub that answers as long as the block lasts."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: Any) -> None:
        """Says nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._repo(found[1], found[2] or "main")
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            self._tree(found[1], found[2])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(*found.groups())
        elif found := re.fullmatch(r"/lfs/(\w+)", path):
            self._bytes(self.server.large[found[1]], found[1])
        else:
            self._fail("EntryNotFound")

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self._body()
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
            self._preupload(self.server.repos[found[1]], json.loads(body))
        elif re.fullmatch(r"/[^/]+/[^/]+\.git/info/lfs/objects/batch", path):
            self._batch(json.loads(body))
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            self._commit(found[1], [json.loads(line) for line in body.splitlines()])
        else:
            self._fail("EntryNotFound")

    def do_PUT(self) -> None:
        oid, data = self.path.removeprefix("/lfs/"), self._body()
        if hashlib.sha256(data).hexdigest() != oid:
            self._json({"error": "the hash is another one"}, 400)
            return
        self.server.large[oid] = data
        self.server.uploaded.append(oid)
        self._json({})

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or 'user'}/{asked['name']}"
        is_new = name not in self.server.repos
        if is_new:
            self.server.repos[name] = repo = Repo()
            repo.commit({})
        self._json({"url": f"{self.server.url}/{name}", "name": name}, 200 if is_new else 409)

    def _preupload(self, repo: Repo, asked: dict[str, Any]) -> None:
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                "shouldIgnore": False,
                "oid": self._oid(repo.commits[-1][1].get(file["path"])),
            }
            for file in asked["files"]
        ]
        self._json({"files": files})

    def _batch(self, asked: dict[str, Any]) -> None:
        answer = []
        for entry in asked["objects"]:
            place = {"upload": {"href": f"{self.server.url}/lfs/{entry['oid']}"}}
            answer.append(
                entry if entry["oid"] in self.server.large else entry | {"actions": place}
            )
        self._json({"transfer": "basic", "objects": answer})

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        repo = self.server.repos[name]
        files = dict(repo.commits[-1][1])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                assert len(self.server.large[value["oid"]]) == value["size"]
                files[value["path"]] = value["oid"]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        oid = repo.commit(files)
        url = f"{self.server.url}/{name}/commit/{oid}"
        self._json({"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""})

    def _repo(self, name: str, revision: str) -> None:
        repo = self.server.repos.get(name)
        found = repo and repo.at(revision)
        if not found:
            self._fail("RevisionNotFound" if repo else "RepoNotFound")
            return
        siblings = [{"rfilename": path} for path in found[1]]
        about = {"_id": "1", "id": name, "modelId": name, "sha": found[0], "siblings": siblings}
        self._json(about | {"private": False, "tags": [], "downloads": 0, "likes": 0})

    def _tree(self, name: str, revision: str) -> None:
        _, files = self.server.repos[name].at(revision) or ("", {})
        self._json([self._entry(path, file) for path, file in files.items()])

    def _entry(self, path: str, file: bytes | str) -> dict[str, Any]:
        entry = {"type": "file", "path": path, "oid": self._oid(file)}
        if isinstance(file, bytes):
            return entry | {"size": len(file)}
        size = len(self.server.large[file])
        return entry | {
            "size": size, "lfs": {"oid": file, "size": size, "pointerSize": POINTER_NBYTES}
        }  # fmt: skip

    @staticmethod
    def _oid(file: bytes | str | None) -> str | None:
        if not isinstance(file, bytes):
            return file
        return hashlib.sha1(b"blob %d\0" % len(file) + file).hexdigest()

    def _file(self, name: str, revision: str, path: str) -> None:
        repo = self.server.repos.get(name)
        found = repo and repo.at(revision)
        if not found:
            self._fail("RevisionNotFound" if repo else "RepoNotFound")
        elif path not in found[1]:
            self._fail("EntryNotFound", {"X-Repo-Commit": found[0]})
        elif isinstance(file := found[1][path], bytes):
            self._bytes(file, str(self._oid(file)), {"X-Repo-Commit": found[0]})
        else:
            size = str(len(self.server.large[file]))
            linked = {"X-Linked-Etag": f'"{file}"', "X-Linked-Size": size}
            # Another host, as the real hub has: the client does not follow such a redirect at once.
            other = self.server.url.replace("127.0.0.1", "localhost")
            place = {"Location": f"{other}/lfs/{file}", "X-Repo-Commit": found[0]}
            self._answer(302, b"", linked | place)

    def _bytes(self, data: bytes, etag: str, headers: dict[str, str] | None = None) -> None:
        headers = {"ETag": f'"{etag}"', "Accept-Ranges": "bytes", **(headers or {})}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        status = 200
        if asked:
            start, stop = int(asked[1]), int(asked[2] or len(data) - 1) + 1
            headers["Content-Range"] = f"bytes {start}-{min(stop, len(data)) - 1}/{len(data)}"
            data, status = data[start:stop], 206
        if self.command == "GET":
            self.server.sent.append((self.path, len(data)))
        self._answer(status, data, headers)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pieces = []
        while size := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _json(self, value: Any, status: int = 200) -> None:
        self._answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _fail(self, code: str, headers: dict[str, str] | None = None) -> None:
        self._answer(404, b"", {"X-Error-Code": code, **(headers or {})})

    def _answer(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
