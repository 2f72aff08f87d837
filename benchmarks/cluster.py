"""Measure packing on a Dask cluster: `python benchmarks/cluster.py`.

Three parts. *Rates*: a folder of files of the real model, packed by `pack_file` one after the other
with one thread and with two, and by `pack_many` on clusters of one and of two worker processes with
one thread each, in turn; starting the cluster is not counted, and outputs are removed in between.
*Overhead*: a thousand tiny files, on the cluster and in this process, and tasks that do nothing.
*Requests*: what one file asks of S3, counted where s3fs sends it, against the server of moto, for
files of several sizes, packed and then skipped.

`--write` keeps the figures in `benchmarks/results/cluster.json`, for docs/scale.md. The command
needs the packages of the extra `test`.
"""

import argparse
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

# Run as a file, a command finds the package `benchmarks` only in the folder that holds it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import figures
from benchmarks.common.process import code_path
from benchmarks.data import sets
from packhorse.disk import pack_file, pack_many
from packhorse.storage.tasks import perform

RESULT = Path(__file__).resolve().parent / "results" / "cluster.json"
KINDS = ("fp32", "bf16", "fp16")
N_TINY = 1000
N_EMPTY = 2000
Result = dict[str, Any]


@contextmanager
def cluster(n_workers: int) -> Iterator[Any]:
    """A client of a cluster of processes with one thread each."""
    import distributed

    with (
        distributed.LocalCluster(
            n_workers=n_workers,
            threads_per_worker=1,
            dashboard_address="127.0.0.1:0",
            silence_logs=100,
        ) as local,
        distributed.Client(local, set_as_default=False) as client,
    ):
        yield client


def processor_seconds(*clients: Any) -> float:
    """What this process and all workers have taken of processors so far."""
    workers = [client.run(time.process_time).values() for client in clients if client is not None]
    return time.process_time() + sum(sum(seconds) for seconds in workers)


def write_models(folder: Path, copies: int) -> list[Path]:
    """Files of the model in all kinds, each several times under other names."""
    paths = []
    for kind in KINDS:
        for i in range(copies):
            paths.append(folder / f"{kind}-{i}.safetensors")
            sets.write_model_file(kind, paths[-1])
    return paths


def rates(folder: Path, copies: int, rounds: int) -> list[Result]:
    """MB/s of each way to pack the same files."""
    paths, out = write_models(folder, copies), folder / "out"
    nbytes = sum(path.stat().st_size for path in paths)

    def plain(threads: int) -> Callable[[], None]:
        def work() -> None:
            for path in paths:
                pack_file(path, out / f"{path.stem}.ph.safetensors", threads=threads)

        return work

    def many(client: Any) -> Callable[[], None]:
        def work() -> None:
            assert pack_many(paths, out, client=client).ok

        return work

    with cluster(1) as one, cluster(2) as two:
        ways = {
            "pack_file, one thread": plain(1),
            "pack_file, two threads": plain(2),
            "pack_many in this process, two threads": many(None),
            "pack_many, one worker": many(one),
            "pack_many, two workers": many(two),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for i in range(rounds + 1):
            for name, work in ways.items():
                shutil.rmtree(out, ignore_errors=True)
                out.mkdir()
                start, before = time.perf_counter(), processor_seconds(one, two)
                work()
                if i:  # the first round warms up
                    times[name].append(time.perf_counter() - start)
                    taken[name].append(processor_seconds(one, two) - before)
    return [
        {
            "way": name,
            "n_files": len(paths),
            "nbytes": nbytes,
            "seconds": found,
            "processor_seconds": taken[name],
            "mb_per_s": nbytes / statistics.median(found) / 1e6,
            "mb_per_processor_s": nbytes / statistics.median(taken[name]) / 1e6,
        }
        for name, found in times.items()
    ]


def overhead(folder: Path) -> Result:
    """What a task costs besides its work, in milliseconds."""
    paths = [folder / f"{i:04}.safetensors" for i in range(N_TINY)]
    for path in paths:
        safetensors.numpy.save_file({"w": np.ones(64, np.float32)}, path)
    seconds = {}
    with cluster(1) as one, cluster(2) as two:
        for name, client in (("here", None), ("one_worker", one), ("two_workers", two)):
            out = folder / name
            out.mkdir()
            start = time.perf_counter()
            assert pack_many(paths, out, client=client).ok
            seconds[name] = time.perf_counter() - start
            start = time.perf_counter()
            assert {file.status for file in pack_many(paths, out, client=client)} == {"skipped"}
            seconds[f"{name}_skipped"] = time.perf_counter() - start
        start, before = time.perf_counter(), processor_seconds(two)
        assert sum(1 for _ in perform(len, deque(["x"] * N_EMPTY), two)) == N_EMPTY
        empty = time.perf_counter() - start
        processor = processor_seconds(two) - before
    more = seconds["one_worker"] - seconds["here"]
    return {
        "n_files": N_TINY,
        "seconds": seconds,
        "ms_per_task": more / N_TINY * 1e3,
        "empty_tasks_per_s": N_EMPTY / empty,
        "processor_ms_per_empty_task": processor / N_EMPTY * 1e3,
    }


@contextmanager
def s3_server() -> Iterator[str]:
    """The address of a server of moto, in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while True:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def requests(folder: Path) -> list[Result]:
    """The requests that files of several sizes make, and the time of processors that they take."""
    import s3fs

    counts: Counter[str] = Counter()
    send = s3fs.S3FileSystem._call_s3

    async def count(self: Any, method: str, *args: Any, **options: Any) -> Any:
        counts[method] += 1
        return await send(self, method, *args, **options)

    s3fs.S3FileSystem._call_s3 = count
    try:
        with s3_server() as address:
            return _requests(folder, address, counts)
    finally:
        s3fs.S3FileSystem._call_s3 = send


def _requests(folder: Path, address: str, counts: Counter[str]) -> list[Result]:
    import s3fs

    options = {"key": "x", "secret": "y", "endpoint_url": address}
    fs = s3fs.S3FileSystem(**options)
    fs.mkdir("bucket")
    rows = []
    for name, parts in (("tiny", 1), ("bf16", 1), ("fp32", 1), ("fp32", 3)):
        path = folder / "model.safetensors"
        if name == "tiny":
            safetensors.numpy.save_file({"w": np.ones(64, np.float32)}, path)
        else:
            sets.write_model_file(name, path)
        nbytes = path.stat().st_size
        fs.put(str(path), f"bucket/{name}{parts}.safetensors")
        for verb in ("packed", "skipped"):
            counts.clear()
            before = time.process_time()
            (report,) = pack_many(
                [f"s3://bucket/{name}{parts}.safetensors"],
                storage_options=options,
                part_nbytes=-(-nbytes // parts) if parts > 1 else 1 << 31,
            )
            assert report.status == verb, report
            rows.append(
                {
                    "file": name,
                    "nbytes": nbytes,
                    "n_parts": report.n_parts,
                    "status": verb,
                    "processor_seconds": time.process_time() - before,
                    "requests": dict(sorted(counts.items())),
                }
            )
    return rows


def main(argv: list[str]) -> int:
    """Measure, print, and keep the figures if asked to.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description="Packing on a Dask cluster.")
    parser.add_argument("--copies", type=int, default=3, metavar="N", help="of each model file")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="timed rounds")
    parser.add_argument("--write", action="store_true", help="keep the figures")
    args = parser.parse_args(argv)
    result: Result = {"kind": "cluster", "date": time.strftime("%Y-%m-%d"), **figures.begin()}
    result["path"] = code_path()
    packages = ("packhorse", "distributed", "s3fs", "moto")
    result["versions"] = {name: version(name) for name in packages}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result["rates"] = rates(folder, args.copies, args.rounds)
        result["overhead"] = overhead(folder)
        result["requests"] = requests(folder)
    figures.end(result)
    for row in result["rates"]:
        print(
            f"{row['way']}: {row['mb_per_s']:.0f} MB/s, {row['mb_per_processor_s']:.0f} a processor"
        )
    print(json.dumps({key: result[key] for key in ("overhead", "requests")}, indent=1))
    if args.write:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
