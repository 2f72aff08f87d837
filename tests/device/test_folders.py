"""Folders of packed models: loaded where Packhorse is imported, they give the model; where it is
not, every way to load them fails. Weights are never random."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from device_samples import PROMPT, llama, same_bits
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from packhorse.device import PackedWeight, pack_model_, unpack_model_
from packhorse.transformers import PackhorseConfig

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is:FutureWarning")
CHILD = Path(__file__).parents[1] / "samples" / "plain_child.py"
METHOD = {"quant_method": "packhorse", "version": 1}


def saved_by_config(folder: Path, *, tied: bool, **options: Any) -> PreTrainedModel:
    plain = folder.with_name(f"{folder.name}-plain")
    llama(tied=tied).save_pretrained(plain)
    model = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.bfloat16, quantization_config=PackhorseConfig()
    )
    model.save_pretrained(folder, **options)
    return model


def saved_in_place(folder: Path, *, tied: bool) -> PreTrainedModel:
    model = llama(tied=tied)
    pack_model_(model)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    transformers.logging.disable_progress_bar()
    place = tmp_path_factory.mktemp("folders")
    base = saved_by_config(place / "config", tied=False)
    saved_by_config(place / "config-tied-shards", tied=True, max_shard_size="200KB")
    saved_in_place(place / "in-place", tied=False)
    saved_in_place(place / "in-place-tied", tied=True)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4)
    base.config.name_or_path = base.name_or_path = str(place / "config")
    get_peft_model(base, config).save_pretrained(place / "adapter")
    names = ("config", "config-tied-shards", "in-place", "in-place-tied", "adapter")
    return {name: place / name for name in names}


def test_folders_fail_where_packhorse_is_not_imported(folders: dict[str, Path]) -> None:
    command = [sys.executable, str(CHILD), *map(str, folders.values())]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    assert found.keys() == folders.keys()
    passed = [
        (name, way) for name, ways in found.items() for way, error in ways.items() if not error
    ]
    assert not passed
    assert {error for ways in found.values() for error in ways.values()} == {
        "RuntimeError",
        "ValueError",
    }
    # `ignore_mismatched_sizes` was asked for, so the weights are new; the log names each of them.
    report = child.stderr.rpartition("LOAD REPORT")[2]
    for name in ("embed_tokens", "lm_head", "self_attn.q_proj", "mlp.down_proj"):
        assert any(name in line and "MISMATCH" in line for line in report.splitlines()), name


def test_folders_load_where_it_is_imported(folders: dict[str, Path]) -> None:
    for name, folder in folders.items():
        if name != "adapter":
            model = AutoModelForCausalLM.from_pretrained(folder)
            assert_same_weights(model, llama(tied="tied" in name))
            assert isinstance(model.lm_head.weight, PackedWeight)
            assert (model.lm_head.weight is model.model.embed_tokens.weight) == ("tied" in name)


def test_a_model_packed_in_place_names_the_method_until_it_is_unpacked(tmp_path: Path) -> None:
    plain = llama()
    plain.save_pretrained(tmp_path / "plain")
    model = copy.deepcopy(plain)
    pack_model_(model, dry_run=True)
    assert not hasattr(model.config, "quantization_config")
    pack_model_(model.model)  # shares the config
    assert model.config.quantization_config == METHOD
    assert not hasattr(plain.config, "quantization_config")
    pack_model_(nn.ModuleList([model]))
    assert model.config.quantization_config == METHOD
    unpack_model_(nn.ModuleList([model]))
    assert not hasattr(model.config, "quantization_config")
    model.save_pretrained(tmp_path / "again")
    files = [
        {path.name: path.read_bytes() for path in tmp_path.glob(f"{n}/*")}
        for n in ("plain", "again")
    ]
    assert files[0] == files[1]


def test_another_method_in_the_config_is_left_alone() -> None:
    model = llama()
    model.config.quantization_config = {"quant_method": "other"}
    pack_model_(model)
    unpack_model_(model)
    assert model.config.quantization_config == {"quant_method": "other"}
    frozen = llama()
    frozen.lm_head.requires_grad_(False)  # so the others are trained and stay plain
    pack_model_(frozen, lm_head=False)
    assert not hasattr(frozen.config, "quantization_config")


@pytest.mark.skipif(not hasattr(transformers, "HrmTextConfig"), reason="no such model here")
def test_weights_that_files_have_in_one_piece_keep_their_names(tmp_path: Path) -> None:
    """transformers joins such weights when it saves a model, but it must not join arrays."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    config = transformers.HrmTextConfig(**sizes, vocab_size=500, num_hidden_layers=1)
    built = transformers.HrmTextForCausalLM(config).to(torch.bfloat16).eval()
    built.save_pretrained(tmp_path / "plain")
    assert any("gate_up_proj" in name for name in load_file(tmp_path / "plain/model.safetensors"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    expected = logits(loaded)
    for model in (built, loaded):
        pack_model_(model.requires_grad_(False))
        model.save_pretrained(tmp_path / "packed")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
        assert torch.equal(logits(again), expected)
        unpack_model_(model)
        model.save_pretrained(tmp_path / "unpacked")
        names = [
            load_file(tmp_path / f"{n}/model.safetensors").keys() for n in ("plain", "unpacked")
        ]
        assert names[0] == names[1]


def assert_same_weights(model: PreTrainedModel, plain: PreTrainedModel) -> None:
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert same_bits(one.unpack() if isinstance(one, PackedWeight) else one, other), name


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=PROMPT).logits
    return found
