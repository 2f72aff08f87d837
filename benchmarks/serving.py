"""Peak memory while vLLM loads a model: `.venv-vllm/bin/python benchmarks/serving.py`.

`make test-vllm` makes that environment. A Llama with random weights is written as a plain folder,
as a folder with packed arrays, and by `packhorse pack`. Each way of loading runs in a process of
its own, on the CPU. Figures are growth of the process while vLLM loads the model, before it
allocates the cache of keys and values: memory with no file behind it, sampled each millisecond, at
its peak and afterwards; and the peak of all resident memory (VmHWM), which counts mapped pages of
the files, too. The allocator of the processes is told to give memory back at once; it would keep up
to a few freed matrices otherwise. vLLM for CPUs itself keeps a second form of the output layer and
of the embedding if they are plain.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STATUS = Path("/proc/self/status")
SECONDS_BETWEEN = 0.001
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "0"}  # of glibc
# The folder, and the method that is given to vLLM. A folder with arrays names the method itself.
WAYS: dict[str, tuple[str, str | None]] = {
    "plain": ("plain", None),
    "packed while it loads": ("plain", "packhorse"),
    "a folder with packed arrays": ("arrays", None),
    "a folder of packhorse pack": ("frames", "packhorse"),
}


def field(name: str) -> int:
    """A field of this process's status, in bytes."""
    line = next(row for row in STATUS.read_text().splitlines() if row.startswith(name))
    return int(line.split()[1]) << 10


def watched(call: Callable[..., Any], found: dict[str, int]) -> Callable[..., Any]:
    """The same function, which also measures how this process grows."""

    def run(*args: Any, **options: Any) -> Any:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
        anonymous, resident, peaks = field("RssAnon:"), field("VmRSS:"), [0]
        done = threading.Event()

        def sample() -> None:
            while not done.wait(SECONDS_BETWEEN):
                peaks[0] = max(peaks[0], field("RssAnon:"))

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            result = call(*args, **options)
        finally:
            done.set()
            sampler.join()
        found["peak"] = peaks[0] - anonymous
        found["after"] = field("RssAnon:") - anonymous
        found["resident_peak"] = field("VmHWM:") - resident
        return result

    return run


def load(folder: str, method: str | None) -> dict[str, int]:
    """Load a folder in this process, and measure."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    from vllm import LLM
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    found: dict[str, int] = {}
    CPUModelRunner.load_model = watched(CPUModelRunner.load_model, found)  # type: ignore[method-assign]
    LLM(
        folder, quantization=method, dtype="bfloat16", enforce_eager=True, max_model_len=256,
        max_num_seqs=4, skip_tokenizer_init=True, disable_log_stats=True,
    )  # fmt: skip
    return found


def make_folders(root: Path, n_layers: int) -> dict[str, int]:
    """Write the three folders; returns the bytes of the files of each."""
    import torch
    import transformers

    from packhorse.device import pack_model_
    from packhorse.disk import pack_folder

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=n_layers,
        num_attention_heads=16, num_key_value_heads=8, vocab_size=32000,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(root / "plain")
    pack_folder(root / "plain", root / "frames")
    pack_model_(model)
    model.save_pretrained(root / "arrays")
    return {
        kind: sum(file.stat().st_size for file in (root / kind).glob("*.safetensors"))
        for kind in ("plain", "arrays", "frames")
    }


def main() -> None:
    """Make the folders, load each way in a process, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("--layers", type=int, default=12, help="of the Llama (12: 534 MB)")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    parser.add_argument("--load", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        folder, method = args.load
        print(json.dumps(load(folder, method or None)))
        return
    figures: dict[str, Any] = {"machine": platform.processor() or platform.machine()}
    with tempfile.TemporaryDirectory() as root:
        figures["files"] = make_folders(Path(root), args.layers)
        figures["ways"] = {}
        for way, (kind, method) in WAYS.items():
            command = [sys.executable, __file__, "--load", f"{root}/{kind}", method or ""]
            done = subprocess.run(
                command, check=True, capture_output=True, text=True, cwd=ROOT,
                env=os.environ | GIVE_BACK,
            )  # fmt: skip
            figures["ways"][way] = json.loads(done.stdout.splitlines()[-1])
    print(f"the plain files have {figures['files']['plain'] / 2**20:.0f} MiB; growth in MiB")
    print(f"{'way':30}{'peak':>8}{'after':>8}{'VmHWM':>8}")
    for way, sizes in figures["ways"].items():
        row = [f"{sizes[key] / 2**20:8.0f}" for key in ("peak", "after", "resident_peak")]
        print(f"{way:30}{''.join(row)}")
    if args.out:
        args.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
