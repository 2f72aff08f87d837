"""Run a language model whose packed weights lie in host memory, and print what lies where.

Pass the folder of a model that was trained in BF16. Without a folder, the example makes a tiny
model with random weights. Without a GPU, everything runs on the host.
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from serve_packed import DEVICE, make_tiny_model  # the example beside this one
from transformers import AutoModelForCausalLM

from packhorse.device import offload_model_
from packhorse.transformers import PackhorseConfig


def main(folder: Path, keep_gb: float) -> None:
    """Load the model to the host, move its layers to where the GPU reads them, and generate."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map="cpu", quantization_config=PackhorseConfig()
    )
    print(offload_model_(model, DEVICE, keep_nbytes=int(keep_gb * 1e9)))

    prompt = torch.tensor([[1, 5, 9, 2]], device=DEVICE)
    start = perf_counter()
    tokens = model.generate(prompt, max_new_tokens=16, do_sample=False)[0].tolist()
    print(tokens)
    print(f"{len(tokens) - 4} tokens in {perf_counter() - start:.2f} s on {DEVICE}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="the model's folder")
    parser.add_argument("--keep-gb", type=float, default=0, help="of weights on the GPU")
    args = parser.parse_args()
    with TemporaryDirectory() as tiny:
        if args.folder is None:
            make_tiny_model(Path(tiny))
        main(args.folder or Path(tiny), args.keep_gb)
