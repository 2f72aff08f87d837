"""A small run of the Trainer of Hugging Face."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


def dataset() -> list[dict[str, torch.Tensor]]:
    tokens = np.random.default_rng(0).integers(0, 64, (24, 12))
    return [{"input_ids": torch.tensor(row), "labels": torch.tensor(row)} for row in tokens]


def small_model() -> GPT2LMHeadModel:
    chosen = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**chosen, bos_token_id=0, eos_token_id=0))


class Stop(TrainerCallback):
    """Ends the run in the middle, as a crash does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def make_trainer(
    folder: Path,
    callbacks: list[Any],
    seed: int = 3,
    model: Callable[[], Any] | None = None,
    tokenizer: Any = None,
    **options: Any,
) -> Trainer:
    """A trainer of a small language model, by default one with dropout and tied weights."""
    transformers.set_seed(seed)
    defaults = {
        "output_dir": str(folder),
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "save_strategy": "steps",
        "save_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
        "dataloader_pin_memory": False,
    }
    args = TrainingArguments(**(defaults | options))
    return Trainer(
        (model or small_model)(), args, train_dataset=dataset(), eval_dataset=dataset()[:6],
        callbacks=callbacks, processing_class=tokenizer,
    )  # fmt: skip


def history(trainer: Trainer) -> list[dict[str, Any]]:
    """The log without times."""
    timed = ("runtime", "per_second", "total_flos", "train_loss")
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in timed)}
        for entry in trainer.state.log_history
    ]
