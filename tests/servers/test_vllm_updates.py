"""The real vLLM follows a trainer: after each update it generates what a model loaded from the
trainer's checkpoint generates."""

import gc
import inspect
from pathlib import Path
from typing import Any

import pytest
import update_stubs
from safetensors.torch import load_file
from served_models import PROMPTS, make_model

from packhorse.integrations.weight_updates import vllm as engines


class Client:
    """The methods of vLLM's clients, on an engine in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.llm.collective_rpc("init_weight_transfer_engine", args=(init_info,))

    def start_weight_update(self) -> None:
        self.llm.collective_rpc("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.llm.collective_rpc("update_weights", args=(update_info,))

    def finish_weight_update(self) -> None:
        self.llm.collective_rpc("finish_weight_update")


def tokens(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    prompts: Any = [{"prompt_token_ids": each} for each in PROMPTS]
    llm.reset_prefix_cache()
    return [
        list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)
    ]


def load(folder: Path, **options: Any) -> Any:
    from vllm import LLM

    return LLM(
        str(folder), dtype="bfloat16", enforce_eager=True, max_model_len=256, max_num_seqs=4,
        skip_tokenizer_init=True, disable_log_stats=True, **options,
    )  # fmt: skip


def checkpoint(folder: Path) -> list[tuple[str, Any]]:
    """Names and tensors as the checkpoint has them, which are not those of the model's modules."""
    return [pair for path in folder.glob("*.safetensors") for pair in load_file(path).items()]


def drop(llm: Any) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    del llm
    gc.collect()
    cleanup_dist_env_and_memory()


@pytest.mark.parametrize("kind", ["dense", "bias"])
def test_an_engine_generates_what_the_trainer_would(tmp_path: Path, kind: str) -> None:
    """Not for tied output layers and experts: on CPUs, vLLM 0.32 keeps packed copies of both, which
    its own reloading does not renew. And its loader of patches needs plain weights, which vLLM for
    CPUs has freed."""
    import torch
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    engines.register()
    model = make_model(kind, seed=1)
    make_model(kind, seed=2).save_pretrained(tmp_path / "served")
    llm = load(
        tmp_path / "served", weight_transfer_config=WeightTransferConfig(backend="packhorse")
    )
    info = engines.TrainerInitInfo(url=str(tmp_path / "updates"))
    trainer = WeightTransferTrainerFactory.trainer_init(
        info, client=Client(llm), source=[("not", "used")]
    )
    found = [tokens(llm)]
    for step in range(3):
        model.save_pretrained(tmp_path / f"step-{step}")
        trainer.send_weights(checkpoint(tmp_path / f"step-{step}"))
        found.append(tokens(llm))
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for weight in model.parameters():
                noise = torch.randn(weight.shape, generator=generator)
                weight += (0.02 * noise * (noise > 1.5)).to(weight.dtype)
    drop(llm)
    del llm, trainer
    for step in range(3):
        reference = load(tmp_path / f"step-{step}")
        wanted = tokens(reference)
        drop(reference)
        del reference
        assert wanted == found[step + 1], step
    assert found[0] != found[1] != found[2] != found[3]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("vllm.distributed.weight_transfer.factory", "WeightTransferEngineFactory"),
        ("vllm.distributed.weight_transfer.factory", "WeightTransferTrainerFactory"),
        ("vllm.model_executor.model_loader.checkpoint_weight_patch", "CheckpointWeightPatch"),
    ],
)
def test_the_stand_ins_have_the_signatures_of_the_real_ones(path: str, name: str) -> None:
    from importlib import import_module

    ours, real = getattr(update_stubs, name), getattr(import_module(path), name)
    for member in ("register_engine", "create_engine", "trainer_init"):
        if hasattr(ours, member):
            wanted = list(inspect.signature(getattr(real, member)).parameters)
            assert list(inspect.signature(getattr(ours, member)).parameters) == wanted
    if name == "CheckpointWeightPatch":
        assert ours._fields == real._fields


def test_our_engine_has_all_that_vllm_asks_of_one() -> None:
    from vllm.distributed.weight_transfer.base import (
        TrainerWeightTransferEngine,
        WeightTransferEngine,
    )

    for ours, real in (
        (engines.DeltaWeightTransferEngine, WeightTransferEngine),
        (engines.DeltaTrainerEngine, TrainerWeightTransferEngine),
    ):
        public = {member for member in vars(real) if not member.startswith("_")}
        assert {member for member in public if not hasattr(ours, member)} == set()
