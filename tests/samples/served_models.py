"""Small language models in folders, for tests with real servers: random weights with rows of
log-normal scales, as trained ones have."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from packhorse.device import pack_model_
from packhorse.disk import pack_folder

__all__ = ["KINDS", "MODELS", "PROMPTS", "make_adapter", "make_folder", "make_model"]

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 512,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Llama", {}),
    "gqa": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True}),
    "moe": (
        "Mixtral",
        {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "padded": ("Llama", {"intermediate_size": 330}),  # not a multiple of 32
    "bias": ("Qwen2", {"num_key_value_heads": 2}),
}
KINDS = ("plain", "arrays", "frames")
PROMPTS = [[1, 5, 9, 2, 77, 30], [4, 4, 8, 16, 32, 64, 99], [7] * 20]


def make_model(name: str, seed: int = 0) -> Any:
    """A BF16 model of transformers."""
    family, options = MODELS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**(SIZES | options))
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
    with torch.no_grad():
        for each in model.parameters():
            if each.dim() >= 2:
                scale = torch.exp(0.3 * torch.randn(*each.shape[:-1], 1)) * each.shape[-1] ** -0.5
                each.copy_(torch.randn(each.shape) * scale)
            elif isinstance(each, nn.Parameter) and not each.any():
                each.copy_(torch.randn(each.shape) * 0.1)
    return model.eval()


def make_folder(root: Path, name: str, kind: str, seed: int = 0) -> Path:
    """A folder of a model, made once.

    Args:
        root: where folders are made.
        name: of the model.
        kind: "plain"; "arrays" of packed weights, in several files; or "frames" of packed files.
        seed: of its weights.
    """
    place = root / f"{name}-{kind}-{seed}"
    if place.exists():
        return place
    if kind == "frames":
        pack_folder(make_folder(root, name, "plain", seed), place)
        return place
    if kind == "arrays":  # loaded, because transformers then saves with the names of checkpoints
        plain = make_folder(root, name, "plain", seed)
        model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
        pack_model_(model)
    else:
        model = make_model(name, seed)
    model.save_pretrained(place, max_shard_size="700KB")
    return place


def make_adapter(root: Path, name: str) -> Path:
    """A folder of a LoRA adapter, as PEFT writes it, for all linear layers of a model."""
    from safetensors.torch import save_file

    place = root / f"{name}-adapter"
    place.mkdir(exist_ok=True)
    torch.manual_seed(5)
    tensors, targets = {}, set()
    for path, layer in make_model(name).named_modules():
        if not isinstance(layer, nn.Linear) or "layers" not in path or path.endswith("gate"):
            continue
        targets.add(path.rpartition(".")[2])
        stem = f"base_model.model.{path}"
        tensors[f"{stem}.lora_A.weight"] = torch.randn(8, layer.in_features).bfloat16() * 0.1
        tensors[f"{stem}.lora_B.weight"] = torch.randn(layer.out_features, 8).bfloat16() * 0.1
    save_file(tensors, place / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": 8, "lora_alpha": 8, "bias": "none", "task_type": "CAUSAL_LM",
        "target_modules": sorted(targets), "base_model_name_or_path": name,
    }  # fmt: skip
    import json

    (place / "adapter_config.json").write_text(json.dumps(config))
    return place
