"""TRL's trainers on models that `PackhorseConfig` has packed with its defaults: with LoRA, losses
and trained weights equal those on the plain model."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset, disable_progress_bars
from device_samples import same_bits
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from packhorse.device import PackedWeight
from packhorse.transformers import PackhorseConfig

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing.*. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True. and:UserWarning"),
]
N_WORDS = 300
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": N_WORDS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Plain models, by whether the output layer shares the weight of the embedding."""
    transformers.logging.disable_progress_bar()
    disable_progress_bars()
    made = {tied: tmp_path_factory.mktemp(f"tied-{tied}") for tied in (False, True)}
    for tied, folder in made.items():
        torch.manual_seed(0)
        config = transformers.Qwen3Config(**SIZES, tie_word_embeddings=tied)
        transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return made


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{n}" for n in range(N_WORDS - 4))]
    model = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def texts(seed: int) -> list[str]:
    numbers = torch.randint(N_WORDS - 4, (4, 9), generator=torch.Generator().manual_seed(seed))
    return [" ".join(f"w{n}" for n in row) for row in numbers.tolist()]


def train(
    kind: str, folder: Path, place: Path, *, packed: bool, modules_to_save: list[str] | None
) -> tuple[list[float], PreTrainedModel]:
    """The losses of two steps, and the model with its adapter."""
    options: dict[str, Any] = {"quantization_config": PackhorseConfig()} if packed else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
    common: dict[str, Any] = {
        "output_dir": str(place), "max_steps": 2, "per_device_train_batch_size": 2, "seed": 0,
        "learning_rate": 1e-2, "logging_steps": 1, "report_to": [], "save_strategy": "no",
        "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    adapter = LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], modules_to_save=modules_to_save
    )
    data = {"text": texts(0)}
    if kind == "DPO":
        data = {"prompt": texts(0), "chosen": texts(1), "rejected": texts(2)}
    trainer_class, config_class = (
        (DPOTrainer, DPOConfig) if kind == "DPO" else (SFTTrainer, SFTConfig)
    )
    torch.manual_seed(1)
    trainer = trainer_class(
        model=model, args=config_class(**common), train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer(), peft_config=adapter,
    )  # fmt: skip
    trainer.train()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each], trainer.model


@pytest.mark.parametrize(
    ("kind", "tied", "modules_to_save"),
    [
        ("SFT", False, None),
        ("DPO", True, None),
        ("SFT", False, ["lm_head"]),
        ("SFT", True, ["embed_tokens"]),
    ],
)
def test_training_is_that_on_the_plain_model(
    folders: dict[bool, Path],
    tmp_path: Path,
    kind: str,
    tied: bool,
    modules_to_save: list[str] | None,
) -> None:
    plain, packed = (
        train(kind, folders[tied], tmp_path, packed=packed, modules_to_save=modules_to_save)
        for packed in (False, True)
    )
    assert packed[0] == plain[0]
    assert len(set(packed[0])) == 2
    models = [dict(model.named_parameters()) for _, model in (plain, packed)]
    trained = {name for name, each in models[0].items() if each.requires_grad}
    assert trained == {name for name, each in models[1].items() if each.requires_grad}
    for name in trained:
        assert torch.equal(models[0][name], models[1][name]), name
    frozen = [models[1][name] for name in models[1].keys() - trained]
    assert sum(isinstance(each, PackedWeight) for each in frozen) >= 7
    for name in modules_to_save or ():
        (saved,) = (each for n, each in models[1].items() if f"{name}.modules_to_save" in n)
        (before,) = (each for n, each in models[1].items() if f"{name}.original_module" in n)
        assert isinstance(before, PackedWeight)
        assert not same_bits(saved, before.unpack())
