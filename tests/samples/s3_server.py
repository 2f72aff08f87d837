"""A server of S3 in this process, which counts requests and the bytes of its answers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

__all__ = ["Request", "Server", "serving"]


@dataclass(frozen=True)
class Request:
    """One request, and how many bytes its answer had."""

    method: str
    path: str
    query: str
    range: str
    nbytes: int


@dataclass
class Server:
    """A server with an empty bucket, called `bucket`.

    Attributes:
        url: its address.
        requests: what was asked since the last `forget`.
        before: is called with the method, path and query of each request, and may block it.
    """

    url: str = ""
    requests: list[Request] = field(default_factory=list)
    before: Callable[[str, str, str], None] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Options for s3fs."""
        return {"key": "x", "secret": "y", "endpoint_url": self.url}

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the environment by which s3fs finds the server."""
        return {
            "AWS_ENDPOINT_URL": self.url, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y",
            "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }  # fmt: skip

    @cached_property
    def fs(self) -> Any:
        """A file system of s3fs, without caches."""
        import s3fs

        return s3fs.S3FileSystem(**self.options, skip_instance_cache=True, use_listings_cache=False)

    def names(self, folder: str = "bucket") -> list[str]:
        """The names of all objects in a folder."""
        return [path[len(folder) + 1 :] for path in self.fs.find(folder)]

    def uploads(self) -> list[Any]:
        """The uploads in parts that were neither completed nor removed."""
        found = self.fs.call_s3("list_multipart_uploads", Bucket="bucket")
        return found.get("Uploads", [])

    def empty(self) -> None:
        """Remove all objects."""
        for path in self.fs.find("bucket"):
            self.fs.rm_file(path)

    def forget(self) -> None:
        """Begin to count anew."""
        self.requests.clear()

    def of(self, method: str) -> list[Request]:
        """The requests of a method."""
        return [request for request in self.requests if request.method == method]


class _Counting:
    """A WSGI application around that of moto."""

    def __init__(self, app: Any, server: Server) -> None:
        self._app, self._server = app, server

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, path, query = (
            environ[key] for key in ("REQUEST_METHOD", "PATH_INFO", "QUERY_STRING")
        )
        if self._server.before is not None:
            self._server.before(method, path, query)
        body = b"".join(self._app(environ, start))
        nbytes = 0 if method == "HEAD" else len(body)
        wanted = environ.get("HTTP_RANGE", "")
        self._server.requests.append(Request(method, path, query, wanted, nbytes))
        return [body]


@contextmanager
def serving() -> Iterator[Server]:
    """Run a server for the time of the block."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    server = Server()
    app = _Counting(DomainDispatcherApplication(create_backend_app), server)
    listening = make_server("127.0.0.1", 0, app, threaded=True)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    try:
        server.url = f"http://127.0.0.1:{listening.server_port}"
        server.fs.mkdir("bucket")
        yield server
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()
