"""A failing network gives one line and exit code 3, or `OSError` in Python. The servers and sockets
are real.

Needs moto's server and s3fs.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_samples import Ended

from packhorse.disk import PackhorseReader, PackhorseWriter, SnapshotStore
from packhorse.storage.remote import open_remote

pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.server")
pytestmark = pytest.mark.filterwarnings("ignore")  # what the libraries of AWS are warned of

Run = Callable[..., Ended]
STATE = {"w": np.random.default_rng(2).integers(0, 1 << 60, 300_000)}
ONCE = {"retries": {"max_attempts": 0}, "connect_timeout": 2, "read_timeout": 2}


def request(url: str, method: str, data: bytes | None = None) -> None:
    headers = {"Content-Type": "text/plain"}
    urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method)).close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """s3fs would try for twelve seconds."""
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server with a bucket and a store in it."""
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    request(f"{url}/networks", "PUT")
    SnapshotStore("s3://networks/run", storage_options=options(url)).take("a", STATE)
    yield url
    server.stop()


def options(url: str) -> dict[str, Any]:
    return {"key": "x", "secret": "y", "endpoint_url": url, "config_kwargs": ONCE}


@contextmanager
def sockets(answer: bytes) -> Iterator[str]:
    """A server that gives every request the same answer and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


CUT = b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n{"
BROKEN = {"refused": None, "cut": b"", "cut in the answer": CUT, "no HTTP": b"220 smtp ready\r\n"}


@contextmanager
def broken(kind: str) -> Iterator[str]:
    answer = BROKEN[kind]
    if answer is None:
        yield closed_port()
        return
    with sockets(answer) as url:
        yield url


def command_env(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that the tools of AWS read."""
    for name, value in {
        "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_MAX_ATTEMPTS": "1", "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    import fsspec

    fsspec.config.conf["s3"] = {"skip_instance_cache": True}
    monkeypatch.setattr("fsspec.config.conf", {"s3": {"skip_instance_cache": True}})


# Attempts


@contextmanager
def counted(*answers: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that gives the answers in turn, then the last one forever; and its requests."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    asked.append(connection.recv(1 << 16))
                    connection.sendall(answers[min(len(asked), len(answers)) - 1])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", asked
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def answer(status: str, code: str) -> bytes:
    text = f"<Error><Code>{code}</Code><Message>m</Message></Error>"
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """s3fs with its own settings."""
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 5)


@pytest.mark.usefixtures("patient")
def test_layers_do_not_multiply_their_attempts() -> None:
    """s3fs alone would read 25 times; aiohttp makes each request that is cut once more."""
    with counted(b"") as (url, asked):
        with pytest.raises(OSError, match=r"store\.json"):
            SnapshotStore("s3://networks/run", storage_options=options(url)).names()
        assert len(asked) <= 8


@pytest.mark.usefixtures("patient")
def test_what_is_busy_is_asked_again() -> None:
    """The number of attempts of s3fs, and of botocore if the user has not set it."""
    busy, gone = answer("503 Slow Down", "SlowDown"), answer("404 Not Found", "NoSuchKey")
    for kwargs in (ONCE, {}):
        with counted(busy, gone) as (url, asked):
            chosen = {**options(url), "config_kwargs": kwargs}
            with pytest.raises(FileNotFoundError):
                open_remote("s3://networks/run", chosen).read("x", 10)
        assert len(asked) == 2


@pytest.mark.usefixtures("patient")
def test_what_the_user_says_of_attempts_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command_env("http://127.0.0.1:1", monkeypatch)
    monkeypatch.delenv("AWS_MAX_ATTEMPTS")

    def chosen(**storage_options: Any) -> tuple[int, Any]:
        fs = open_remote("s3://networks/run", storage_options)._fs  # type: ignore[attr-defined]
        return fs.retries, fs.config_kwargs.get("retries")

    ours = {"total_max_attempts": 4}
    assert chosen() == (2, ours)
    assert chosen(config_kwargs={"read_timeout": 3}) == (2, ours)
    own = {"max_attempts": 9}
    assert chosen(config_kwargs={"retries": own}) == (2, own)
    file = tmp_path / "config"
    file.write_text("[profile slow]\nmax_attempts = 9\n[default]\nregion = x\n")
    with monkeypatch.context() as patch:
        patch.setenv("AWS_CONFIG_FILE", str(file))
        assert chosen(profile="slow") == (2, None)
    for name, value in (("AWS_MAX_ATTEMPTS", "9"), ("AWS_RETRY_MODE", "standard")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert chosen() == (2, None)
    with monkeypatch.context() as patch:
        patch.setattr("s3fs.S3FileSystem.retries", 7)
        assert chosen() == (7, None)
    import s3fs

    assert s3fs.S3FileSystem(skip_instance_cache=True).retries == 5


@pytest.mark.parametrize("kind", BROKEN)
def test_every_use_of_a_broken_network_is_an_os_error(kind: str) -> None:
    with broken(kind) as url:
        store = SnapshotStore("s3://networks/run", storage_options=options(url))
        reader = PackhorseReader("s3://networks/dcp/0", storage_options=options(url))
        for use in (
            store.names,
            lambda: store.restore("a"),
            lambda: store.take("b", {}),
            lambda: store.verify(),
            lambda: store.prune(keep=1),
            reader.read_metadata,
        ):
            with pytest.raises(OSError, match=r"^s3://networks/\S+: .+; check ") as told:
                use()
            assert type(told.value).__module__ == "builtins"
            assert told.value.__cause__ is not None


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_network_is_one_line(kind: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with broken(kind) as url:
        command_env(url, monkeypatch)
        done = run("snapshot", "list", "s3://networks/run", "--json")
    assert done.code == 3
    assert done.error.startswith("s3://networks/run/store.json: ")
    (error,) = json.loads(done.out)["errors"]
    assert error == {"path": "s3://networks/run", "exit_code": 3, "message": done.error}


def test_a_connection_that_is_cut_in_mid_read_is_no_bad_data(server: str) -> None:
    """A proxy between the program and the server passes on this number of bytes, then closes."""
    left = [10_000]
    target = ("127.0.0.1", int(server.rpartition(":")[2]))
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                threading.Thread(target=pass_on, args=(connection,), daemon=True).start()

        def pass_on(connection: socket.socket) -> None:
            with connection, socket.create_connection(target) as there:
                threading.Thread(target=copy, args=(connection, there), daemon=True).start()
                copy(there, connection, left)

        def copy(source: socket.socket, sink: socket.socket, room: list[int] | None = None) -> None:
            try:
                while data := source.recv(4096):
                    if room is not None:
                        room[0] -= len(data)
                        if room[0] < 0:
                            break
                    sink.sendall(data)
                for end in (source, sink):
                    end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        store = SnapshotStore("s3://networks/run", storage_options=options(url))
        with pytest.raises(OSError, match=r"^s3://networks/run/packs/"):
            store.verify()
        left[0] = 10**9
        assert store.verify() == []


@pytest.fixture
def locked(server: str) -> Iterator[str]:
    """A server that requires credentials."""
    request(f"{server}/moto-api/reset-auth", "POST", b"0")
    yield server
    request(f"{server}/moto-api/reset-auth", "POST", b"inf")


def test_credentials_that_are_refused(
    locked: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SnapshotStore("s3://networks/run", storage_options=options(locked))
    for use in (store.names, lambda: store.restore("a"), lambda: store.take("b", {})):
        with pytest.raises(PermissionError, match=r"s3://networks/run/.*; check the credentials"):
            use()
    command_env(locked, monkeypatch)
    done = run("snapshot", "verify", "s3://networks/run")
    assert (done.code, done.out) == (3, "")
    assert "check the credentials" in done.error


def test_credentials_that_are_not_there(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command_env(server, monkeypatch)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(OSError, match="Unable to locate credentials; check "):
        SnapshotStore("s3://networks/run").names()


def test_a_bucket_that_is_not_there_is_not_made(
    server: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One letter of the key is wrong."""
    command_env(server, monkeypatch)
    for url in ("s3://networkss/run", "s3://networks/other"):
        for words in (["list"], ["show"], ["verify"]):
            done = run("snapshot", *words, url)
            assert (done.code, done.out) == (3, "")
            assert done.error == f"{url}: there is no snapshot store here; check the path"
    with pytest.raises(FileNotFoundError, match=r"s3://networkss/run/.* bucket does not exist"):
        SnapshotStore("s3://networkss/run", storage_options=options(server)).take("a", {})
    with pytest.raises(urllib.error.HTTPError, match="404"):
        request(f"{server}/networkss", "GET")


def test_a_good_network_is_as_before(
    server: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    command_env(server, monkeypatch)
    listed = run("snapshot", "list", "s3://networks/run")
    assert (listed.code, listed.err) == (0, "")
    assert listed.out.startswith("s3://networks/run\n")


MISSING = """
import sys
sys.modules["s3fs"] = sys.modules["gcsfs"] = None
from packhorse.disk import SnapshotStore
from packhorse.errors import MissingBackendError
for url in ("s3://networks/run", "gs://bucket/run"):
    try:
        SnapshotStore(url)
    except MissingBackendError as error:
        print(error)
from packhorse.cli import main
sys.exit(main(["snapshot", "list", "s3://networks/run", "--json"]))
"""


def test_a_missing_package_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MISSING], capture_output=True, text=True, env=dict(os.environ)
    )
    words = "s3://networks/run: needs s3fs; install it with: pip install 'packhorse[remote]'"
    first, second, *rest = done.stdout.splitlines()
    assert first == words
    assert second.startswith("gs://bucket/run: needs a package that is not installed: ")
    assert "gcsfs" in second
    assert done.stderr == f"packhorse: error: {words}\n"
    (error,) = json.loads("\n".join(rest))["errors"]
    assert (done.returncode, error["exit_code"], error["message"]) == (4, 4, words)


def test_a_writer_tells_a_broken_network_too() -> None:
    writer = PackhorseWriter("s3://networks/dcp/1", storage_options=options(closed_port()))
    with pytest.raises(OSError, match=r"^s3://networks/dcp/1\S*: "):
        writer.prepare_local_plan(None)  # type: ignore[arg-type]
