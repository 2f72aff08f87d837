"""Generate text with keys and values packed in memory of the host, and print what they take.

Pass the folder of a language model, with its tokenizer. Without a folder, the example makes a small
model with random weights, and compares its tokens with those of an ordinary cache.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig
from transformers import LlamaForCausalLM as Llama

from packhorse.transformers import PackedHostCache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def small_model() -> Llama:
    """A model with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=1000,
    )  # fmt: skip
    return Llama(config).to(torch.bfloat16).eval()


def main(folder: Path | None, text: str, n_new: int) -> None:
    """Generate with a packed cache, and print its report."""
    if folder is None:
        model, tokenizer = small_model().to(DEVICE), None
        ids = torch.randint(3, 1000, (2, 300), device=DEVICE)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(DEVICE)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer(text, return_tensors="pt").input_ids.to(DEVICE)
    options = {"max_new_tokens": n_new, "do_sample": False, "attention_mask": torch.ones_like(ids)}

    cache = PackedHostCache(model.config)
    found = model.generate(ids, past_key_values=cache, **options)
    print(cache.report())
    if tokenizer is not None:
        print(tokenizer.decode(found[0]))
        return
    plain = model.generate(ids, past_key_values=DynamicCache(config=model.config), **options)
    print("the same tokens:", torch.equal(found, plain))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="the model's folder")
    parser.add_argument("--prompt", default="A packhorse carries", help="the text to continue")
    parser.add_argument("--new", type=int, default=60, help="how many tokens to generate")
    args = parser.parse_args()
    main(args.folder, args.prompt, args.new)
