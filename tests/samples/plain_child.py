"""A process for device/test_folders.py: loads folders of packed models without Packhorse.

The arguments are folders; all ways to load are tried with the first of them. One JSON object goes
to standard output: for each folder and way to load it the error's type, or null if there was none.
What transformers logs goes to standard error.
"""

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import accelerate
import torch
import transformers
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaForCausalLM

CLASSIFIER = transformers.AutoModelForSequenceClassification


def load_state(folder: Path, *, assign: bool) -> object:
    model = LlamaForCausalLM(AutoConfig.from_pretrained(folder))
    state = {}
    for file in folder.glob("*.safetensors"):
        state |= load_file(file)
    return model.load_state_dict(state, strict=False, assign=assign)


def load_with_accelerate(folder: Path) -> object:
    with accelerate.init_empty_weights():
        model = LlamaForCausalLM(AutoConfig.from_pretrained(folder))
    return accelerate.load_checkpoint_and_dispatch(model, folder, device_map={"": "cpu"})


WAYS: dict[str, Callable[[Path], object]] = {
    "causal": AutoModelForCausalLM.from_pretrained,
    "base": AutoModel.from_pretrained,
    "classifier": CLASSIFIER.from_pretrained,
    "FP32": lambda folder: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
    "pipeline": lambda folder: transformers.pipeline("text-generation", model=str(folder)),
    "state": lambda folder: load_state(folder, assign=False),
    "state assigned": lambda folder: load_state(folder, assign=True),
    "accelerate": load_with_accelerate,
}


def outcome(load: Callable[[Path], object], folder: Path) -> str | None:
    try:
        load(folder)
    except Exception as error:
        return type(error).__name__
    return None


def main() -> None:
    transformers.logging.disable_progress_bar()
    found = {}
    first, *_ = folders = [Path(name) for name in sys.argv[1:]]
    for folder in folders:
        ways = WAYS if folder == first else {"causal": AutoModelForCausalLM.from_pretrained}
        if (folder / "adapter_config.json").exists():
            ways = {"adapter": AutoPeftModelForCausalLM.from_pretrained}
        with contextlib.redirect_stdout(sys.stderr):
            found[folder.name] = {way: outcome(load, folder) for way, load in ways.items()}
    AutoModelForCausalLM.from_pretrained(first, ignore_mismatched_sizes=True)
    assert "packhorse" not in sys.modules
    print(json.dumps(found))


if __name__ == "__main__":
    main()
