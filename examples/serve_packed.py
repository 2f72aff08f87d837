"""Load a language model with packed weights, print what that saves, and generate text.

Pass the folder of a model that was trained in BF16, with its tokenizer, either as published or
packed by `packhorse pack`. Without a folder, the example makes a tiny model with random weights.
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from packhorse.transformers import PackhorseConfig, load_packed_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_tiny_model(folder: Path) -> None:
    """Write a model with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=1000,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def main(folder: Path, text: str) -> None:
    """Load the model with packed weights, print the report, and generate."""
    is_packed = any(folder.glob("*.ph.safetensors"))
    load = load_packed_model if is_packed else AutoModelForCausalLM.from_pretrained
    options = {"dtype": torch.bfloat16, "device_map": DEVICE}
    model = load(folder, quantization_config=PackhorseConfig(), **options)
    print(model.hf_quantizer.report)

    tokenizer, prompt = None, {"input_ids": torch.tensor([[1, 5, 9, 2]], device=DEVICE)}
    if any(folder.glob("tokenizer*")):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        prompt = tokenizer(text, return_tensors="pt").to(DEVICE)
    start = perf_counter()
    tokens = model.generate(**prompt, max_new_tokens=32, do_sample=False)[0].tolist()
    seconds = perf_counter() - start
    print(tokens if tokenizer is None else tokenizer.decode(tokens))
    print(f"{len(tokens) - prompt['input_ids'].shape[1]} tokens in {seconds:.2f} s on {DEVICE}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="the model's folder")
    parser.add_argument("--prompt", default="A packhorse carries", help="the text to continue")
    args = parser.parse_args()
    with TemporaryDirectory() as tiny:
        if args.folder is None:
            make_tiny_model(Path(tiny))
        main(args.folder or Path(tiny), args.prompt)
