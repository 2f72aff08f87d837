"""Files at URLs: only needed bytes are read, an object appears whole, and a change is noticed.

The server is a real one (moto), in this process, and counts requests and bytes.
"""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from s3_server import Server

import packhorse
from packhorse.disk import (
    logical_nbytes,
    pack_file,
    plan_file,
    unpack_file,
    verify_file,
)
from packhorse.errors import ChangedError, CorruptionError
from packhorse.numpy import compress, load_file, save_file
from packhorse.storage import upload

pytestmark = pytest.mark.filterwarnings("ignore")  # what the libraries of AWS are warned of

PACKED = "s3://bucket/model.ph.safetensors"
HEAD = 1 << 17  # read first of any file
MIB = 1 << 20


def tensors(n: int = 4, rows: int = 2048) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    found: dict[str, np.ndarray[Any, Any]] = {
        f"layers.{i}.weight": rng.normal(0, 0.02, (rows, 1024)).astype(ml_dtypes.bfloat16)
        for i in range(n)
    }
    return found | {"bias": rng.normal(0, 1, 300).astype(np.float32), "none": np.zeros((0, 3))}


def same(found: Any, expected: dict[str, np.ndarray[Any, Any]]) -> bool:
    return list(found) == sorted(expected) and all(
        found[name].dtype == array.dtype and found[name].tobytes() == array.tobytes()
        for name, array in expected.items()
    )


@pytest.fixture
def model(s3: Server) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a packed file of some 10 MB."""
    expected = tensors()
    save_file(expected, PACKED)
    s3.forget()
    return expected


def test_a_slice_reads_the_header_and_its_chunks(
    s3: Server, model: dict[str, np.ndarray[Any, Any]]
):
    size = s3.fs.size(PACKED)
    s3.forget()
    weight = model["layers.2.weight"]
    with packhorse.open_file(PACKED) as file:
        assert [request.method for request in s3.requests] == ["HEAD", "GET"]
        assert sum(request.nbytes for request in s3.requests) == HEAD
        s3.forget()
        part = file.get_slice("layers.2.weight")
        assert s3.requests == []
        rows = part[1000:1016]
        assert rows.tobytes() == weight[1000:1016].tobytes()
        # The header of the frame, the chunks of the rows, and the question for changes.
        assert [request.method for request in s3.requests] == ["GET", "GET", "HEAD"]
        frame = next(frame for name, frame in file.outlines() if name == "layers.2.weight")
        chunk_nbytes = frame.nbytes / frame.n_chunks
        assert frame.n_chunks > 8
        assert s3.requests[0].nbytes == 1 << 16
        assert s3.requests[1].nbytes < 2.1 * chunk_nbytes
        s3.forget()
        assert part[-1].tobytes() == weight[-1].tobytes()
        assert [request.method for request in s3.requests] == ["GET"]
        assert s3.requests[0].nbytes < 1.1 * chunk_nbytes < size / 20
        s3.forget()
        assert file.get_tensor("bias").tobytes() == model["bias"].tobytes()
        assert sum(request.nbytes for request in s3.requests) < 2000


def test_all_tensors_take_few_large_requests(s3: Server, model: dict[str, np.ndarray[Any, Any]]):
    size = s3.fs.size(PACKED)
    s3.forget()
    assert same(load_file(PACKED), model)
    assert len(s3.of("GET")) == 1 + -(-size // (8 * MIB))
    assert sum(request.nbytes for request in s3.requests) == HEAD + size
    assert len(s3.of("HEAD")) == 2


def test_a_long_header_takes_two_requests(s3: Server):
    many = {f"name.{i:05}": np.full(1, i) for i in range(2000)}
    save_file(many, PACKED)
    s3.forget()
    with packhorse.open_file(PACKED) as file:
        assert len(s3.of("GET")) == 2
        assert file.get_tensor("name.01234")[0] == 1234
    s3.forget()
    assert same(load_file(PACKED), many)
    assert len(s3.of("GET")) == 3


def test_plain_files_are_read_in_ranges_too(s3: Server, tmp_path: Path):
    expected = {"a": np.arange(1_000_000.0), "b": np.arange(12).reshape(3, 4)}
    safetensors.numpy.save_file(expected, tmp_path / "plain.safetensors", {"k": "v"})
    url = "s3://bucket/plain.safetensors"
    s3.fs.put_file(tmp_path / "plain.safetensors", url)
    s3.forget()
    with packhorse.open_file(url) as file:
        assert file.metadata() == {"k": "v"}
        part = file.get_slice("a")[500_000:500_010]
        assert part.tolist() == list(range(500_000, 500_010))
        assert s3.of("GET")[1].nbytes == 80
    s3.forget()
    assert same(load_file(url), expected)
    assert len(s3.of("GET")) == 2


def test_torch_reads_and_writes_urls(s3: Server):
    import torch

    from packhorse.torch import load, load_file, save, save_file

    state = {"model": {"w": torch.arange(5.0)}, "step": 3}
    save(state, "s3://bucket/state.ph.safetensors", storage_options=s3.options)
    found = load("s3://bucket/state.ph.safetensors", storage_options=s3.options)
    assert torch.equal(found["model"]["w"], state["model"]["w"])
    save_file({"w": torch.ones(3)}, PACKED)
    assert load_file(PACKED)["w"].tolist() == [1.0, 1.0, 1.0]
    with packhorse.open_file(PACKED, "pt") as file:
        assert file.get_slice("w")[1:].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("url", ["memory://urls/{}", "file://{}", "s3://bucket/a b/ü%20{}"])
def test_files_are_packed_unpacked_and_verified(s3: Server, tmp_path: Path, url: str):
    folder = str(tmp_path).strip("/") if url.startswith("memory") else str(tmp_path)
    source, packed, back = (
        url.format(f"{folder}/{name}.safetensors" if "{}" in url else name)
        for name in ("plain", "small.ph", "back")
    )
    local = tmp_path / "plain.safetensors"
    safetensors.numpy.save_file({"w": np.arange(100_000), "b": np.ones(3)}, local)
    if not url.startswith("file"):
        import fsspec

        with fsspec.open(source, "wb") as file:
            file.write(local.read_bytes())
    done: list[int] = []
    result = pack_file(source, packed, progress=done.append)
    assert str(result.output).endswith("small.ph.safetensors")
    assert sum(done) == logical_nbytes(source) == logical_nbytes(packed) == 800_024
    assert verify_file(packed) == []
    assert sorted(plan.name for plan in plan_file(source)) == ["b", "w"]
    unpack_file(packed, back)
    unpack_file(packed, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == local.read_bytes()
    assert same(load_file(back), safetensors.numpy.load_file(local))
    for use in (lambda: pack_file(source, packed), lambda: unpack_file(packed, back)):
        with pytest.raises(FileExistsError, match="already exists"):
            use()
    pack_file(source, packed, force=True)
    with pytest.raises(ValueError, match="the output is the input itself"):
        pack_file(source, source, force=True)


def test_a_base_at_a_url(s3: Server):
    old = tensors(2, rows=256)
    new = {
        name: (array.astype(np.float64) * 1.001).astype(array.dtype) for name, array in old.items()
    }
    save_file(old, "s3://bucket/old.ph.safetensors")
    save_file(new, "s3://bucket/new.ph.safetensors", base="s3://bucket/old.ph.safetensors")
    based = "s3://bucket/new.ph.safetensors"
    assert same(load_file(based, base="s3://bucket/old.ph.safetensors"), new)
    assert verify_file(based, base="s3://bucket/old.ph.safetensors") == []
    with packhorse.open_file(based, base="s3://bucket/old.ph.safetensors") as file:
        again = pickle.loads(pickle.dumps(file))
        for each in (file, again):
            rows = each.get_slice("layers.1.weight")[7:9]
            assert rows.tobytes() == new["layers.1.weight"][7:9].tobytes()
    with pytest.raises(ValueError, match="the output is the base itself"):
        save_file(new, "s3://bucket/old.ph.safetensors", base="s3://bucket/old.ph.safetensors")


def test_an_object_that_is_replaced_is_noticed(s3: Server, model: dict[str, np.ndarray[Any, Any]]):
    with packhorse.open_file(PACKED) as file:
        before = file.get_slice("layers.0.weight")[:2]
        data = s3.fs.cat_file(PACKED)
        save_file(tensors(4, rows=1500), PACKED)
        for use in (
            lambda: file.get_tensor("layers.1.weight"),
            lambda: file.get_slice("layers.0.weight")[300:400],
            file.get_tensors,
            lambda: list(file.outlines()),
        ):
            with pytest.raises(ChangedError, match=rf"{PACKED}: changed since .* open it again"):
                use()
        pickled = pickle.dumps(file)
        with pytest.raises(ChangedError, match="is not the file that was pickled"):
            pickle.loads(pickled)
        s3.fs.pipe_file(PACKED, data)
        assert file.get_slice("layers.0.weight")[:2].tobytes() == before.tobytes()
        s3.fs.rm_file(PACKED)
        with pytest.raises(ChangedError, match="it was removed"):
            file.get_tensor("layers.3.weight")


def test_a_source_that_is_replaced_gives_no_output(s3: Server, tmp_path: Path):
    local = tmp_path / "plain.safetensors"
    safetensors.numpy.save_file({"w": np.arange(100)}, local)
    s3.fs.put_file(local, "bucket/plain.safetensors")

    def replace(nbytes: int) -> None:
        s3.fs.pipe_file("bucket/plain.safetensors", b"x" * 900)

    with pytest.raises(OSError, match=r"plain.safetensors: changed while it was being read .its s"):
        pack_file("s3://bucket/plain.safetensors", PACKED, progress=replace)
    assert s3.names() == ["plain.safetensors"]


def test_damage_at_a_url_is_told(s3: Server, model: dict[str, np.ndarray[Any, Any]]):
    data = bytearray(s3.fs.cat_file(PACKED))
    data[-3000] ^= 1
    s3.fs.pipe_file(PACKED, bytes(data))
    with pytest.raises(CorruptionError, match=rf"^{PACKED}: tensor 'layers.3.weight': byte \d+"):
        load_file(PACKED)
    (problem,) = verify_file(PACKED)
    assert (str(problem.path), problem.tensor) == (PACKED, "layers.3.weight")
    s3.fs.pipe_file(PACKED, bytes(data[:-1]))
    with pytest.raises(CorruptionError, match="cut short"):
        packhorse.open_file(PACKED)
    s3.fs.pipe_file(PACKED, b"")
    with pytest.raises(CorruptionError, match="not a safetensors file, or cut short"):
        packhorse.open_file(PACKED)


def read_rows(file: packhorse.disk.PackedFile, results: Any) -> None:
    results.put(file.get_slice("layers.1.weight")[5:7].tobytes())


@pytest.mark.parametrize("threads", [1, 2])
def test_tensors_at_a_url_are_decoded_together(
    s3: Server, decoded_together: list[int], threads: int
):
    rng = np.random.default_rng(2)
    expected = {f"n{i:03}": rng.normal(0, 1, 384).astype(np.float32) for i in range(200)}
    expected |= {f"m{i:03}": rng.normal(0, 1, (1024, 2048)).astype(np.float32) for i in range(3)}
    save_file(expected, PACKED)
    assert s3.fs.size(PACKED) > 1 << 24  # more than one block is read
    assert same(load_file(PACKED, threads=threads), expected)
    assert decoded_together == [len(expected)]
    data = bytearray(s3.fs.cat_file(PACKED))
    data[data.index(compress(expected["n150"]).to_bytes()[-500:-400])] ^= 1
    s3.fs.pipe_file(PACKED, bytes(data))
    with pytest.raises(CorruptionError, match=rf"^{PACKED}: tensor 'n150': byte \d+"):
        load_file(PACKED, threads=threads)


@pytest.mark.parametrize(("method", "n"), [("fork", 2), ("spawn", 1)])
def test_workers_of_data_loaders_read(
    s3: Server, model: dict[str, np.ndarray[Any, Any]], method: str, n: int
):
    context = multiprocessing.get_context(method)
    results = context.Queue()
    with packhorse.open_file(PACKED) as file:
        file.get_slice("layers.1.weight")[:1]
        workers = [context.Process(target=read_rows, args=(file, results)) for _ in range(n)]
        for worker in workers:
            worker.start()
        found = {results.get(timeout=60) for _ in workers}
        for worker in workers:
            worker.join()
        assert found == {model["layers.1.weight"][5:7].tobytes()}
        assert [worker.exitcode for worker in workers] == [0] * n


def test_threads_share_a_file(s3: Server, model: dict[str, np.ndarray[Any, Any]]):
    errors = []
    with packhorse.open_file(PACKED) as file:

        def read(i: int) -> None:
            for row in range(0, 2000, 500):
                name = f"layers.{i % 4}.weight"
                if file.get_slice(name)[row].tobytes() != model[name][row].tobytes():
                    errors.append((i, row))

        threads = [threading.Thread(target=read, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []


# Writing


def test_an_upload_that_is_refused_leaves_nothing(s3: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(upload, "_PART_NBYTES", 5 * MIB)
    sent = []

    def refuse(method: str, path: str, query: str) -> None:
        if "partNumber=" in query:
            sent.append(query)
            raise RuntimeError("the server breaks")

    s3.before = refuse
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(OSError, match=rf"^{PACKED}: "):
        save_file(tensors(), PACKED)
    s3.before = None
    assert sent
    assert (s3.names(), s3.uploads()) == ([], [])


def test_an_interrupted_upload_leaves_nothing(s3: Server, monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C while the parts are sent. The parts that were sent are removed."""
    monkeypatch.setattr(upload, "_PART_NBYTES", 5 * MIB)
    monkeypatch.setattr(upload, "_N_PARTS", 1)

    def interrupt(method: str, path: str, query: str) -> None:
        if "partNumber=1&" in query:
            os.kill(os.getpid(), signal.SIGINT)

    s3.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        save_file(tensors(), PACKED)
    assert not [request for request in s3.requests if "partNumber=2" in request.query]
    assert (s3.names(), s3.uploads()) == ([], [])


def test_an_error_before_the_upload_asks_nothing_of_the_server(s3: Server, tmp_path: Path):
    def stop(nbytes: int) -> None:
        raise RuntimeError("no more")

    safetensors.numpy.save_file({"w": np.arange(100)}, tmp_path / "plain.safetensors")
    with pytest.raises(RuntimeError, match="no more"):
        pack_file(tmp_path / "plain.safetensors", PACKED, progress=stop)
    assert (s3.names(), s3.of("PUT"), s3.of("POST")) == ([], [], [])


MEMORY = """
import sys, threading, time
from packhorse.disk import pack_file, verify_file
from packhorse.storage import remote_source
from packhorse.storage import remote_object, upload
upload._PART_NBYTES, upload._N_PARTS = 5 << 20, 1
remote_source._BLOCK_NBYTES = remote_object._READ_NBYTES = 8 << 20

def taken():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))

def work(source, target):
    pack_file(source, target)
    assert verify_file(target) == []

work("small.safetensors", "s3://bucket/small.ph.safetensors")
before, peak = taken(), 0
thread = threading.Thread(
    target=work, args=("large.safetensors", "s3://bucket/large.ph.safetensors")
)
thread.start()
while thread.is_alive():
    peak = max(peak, taken())
    time.sleep(0.01)
print(peak - before)
"""


def test_memory_does_not_grow_with_the_file(s3: Server, tmp_path: Path):
    """A batch of tensors is 32 MiB; reading, packing and uploading share the bound."""
    rng = np.random.default_rng(0)
    for name, n in (("small", 1), ("large", 32)):
        noise = {f"w{i:02}": rng.integers(0, 256, 4 * MIB, np.uint8) for i in range(n)}
        safetensors.numpy.save_file(noise, tmp_path / f"{name}.safetensors")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEMORY], capture_output=True, text=True,
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert 0 < int(done.stdout) * 1024 < 120 * MIB < s3.fs.size("bucket/large.ph.safetensors")


# Errors


@pytest.mark.parametrize("use", [packhorse.open_file, load_file, verify_file, logical_nbytes])
def test_what_is_not_there_is_named(s3: Server, use: Any):
    for url in ("s3://bucket/no.ph.safetensors", "s3://no-bucket/no.ph.safetensors"):
        with pytest.raises(FileNotFoundError, match=f"^{url}: .*; check the address$"):
            use(url)
    with pytest.raises(IsADirectoryError, match="a folder, but a file is needed"):
        use("s3://bucket")


def test_a_missing_bucket_is_named_when_writing(s3: Server):
    with pytest.raises(FileNotFoundError, match=r"^s3://no-bucket/x: .*bucket.*check the address$"):
        save_file({"w": np.ones(3)}, "s3://no-bucket/x")


def test_an_unknown_protocol_and_a_missing_package():
    with pytest.raises(ValueError, match=r"^odd://x: .*odd.*; check the address$"):
        packhorse.open_file("odd://x")
    code = (
        "import sys; sys.modules['s3fs'] = None\nfrom packhorse.numpy import save_file\n"
        "save_file({}, 's3://b/x')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    words = "MissingBackendError: s3://b/x: needs s3fs; install it with: pip install 'packhorse[rem"
    assert words in done.stderr


def test_a_full_disk_for_temporary_files_is_explained(s3: Server):
    code = (
        "import resource, signal, numpy as np; from packhorse.numpy import save_file\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))\n"
        f"save_file({{'w': np.random.default_rng(0).random(9999)}}, {PACKED!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert f"a temporary file for {PACKED}; TMPDIR says where such files go" in done.stderr


def test_other_protocols_need_nothing_of_ours(s3: Server, model: dict[str, np.ndarray[Any, Any]]):
    """HTTP: the file system is that of fsspec, and the server answers ranges."""
    s3.fs.call_s3("put_bucket_acl", Bucket="bucket", ACL="public-read")
    s3.fs.call_s3("put_object_acl", Bucket="bucket", Key="model.ph.safetensors", ACL="public-read")
    url = f"{s3.url}/bucket/model.ph.safetensors?x=1"
    s3.forget()
    with packhorse.open_file(url) as file:
        rows = file.get_slice("layers.0.weight")[:2]
    assert rows.tobytes() == model["layers.0.weight"][:2].tobytes()
    assert sum(request.nbytes for request in s3.requests) < 3 * HEAD
