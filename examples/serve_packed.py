"""Load a language model with packed weights, see what that saves, and generate.

Run `python examples/serve_packed.py [FOLDER]`: a folder of a model that was trained in BF16, with
its tokenizer. Without one, a tiny model with random weights is made.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from packhorse.transformers import PackhorseConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_tiny_model(folder: Path) -> None:
    """Write a model that knows nothing."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=1000,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def main(folder: Path, *, has_tokenizer: bool) -> None:
    """Pack on load, report, generate."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map=DEVICE, quantization_config=PackhorseConfig()
    )
    print(model.hf_quantizer.report)
    if DEVICE == "cuda":
        print(f"memory on the GPU: {torch.cuda.memory_allocated() / 2**20:.0f} MiB")

    tokenizer = AutoTokenizer.from_pretrained(folder) if has_tokenizer else None
    prompt = {"input_ids": torch.tensor([[1, 5, 9, 2]], device=DEVICE)}
    if tokenizer is not None:
        prompt = tokenizer("A packhorse carries", return_tensors="pt").to(DEVICE)
    start = perf_counter()
    tokens = model.generate(**prompt, max_new_tokens=32, do_sample=False)[0].tolist()
    seconds = perf_counter() - start
    print(tokens if tokenizer is None else tokenizer.decode(tokens))
    n_new = len(tokens) - prompt["input_ids"].shape[1]
    print(f"{n_new} tokens in {seconds:.2f} s on {DEVICE}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]), has_tokenizer=True)
    else:
        with TemporaryDirectory() as tiny:
            make_tiny_model(Path(tiny))
            main(Path(tiny), has_tokenizer=False)
