"""A folder that is restored from a snapshot of the real Trainer is a model, as the Trainer's own
checkpoint of the same step is."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_samples import one_thread

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of importing it
    import transformers
    from peft import LoraConfig, PeftModel, get_peft_model
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from trainer_samples import Stop, dataset, history, make_trainer, small_model

import packhorse
from packhorse.disk import SnapshotStore
from packhorse.transformers import PackhorseCallback, restore_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]
TRAINING = {"optimizer.pt", "scheduler.pt", "rng_state.pth"}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, for adapters."""
    transformers.set_seed(5)
    folder = tmp_path_factory.mktemp("base")
    small_model().save_pretrained(folder)
    return folder


def tokenizer() -> Any:
    inner = Tokenizer(WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[UNK]")
    found.chat_template = "{{ messages }}"
    return found


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def both(tmp_path: Path, **options: Any) -> tuple[Path, Path]:
    """The folder of the Trainer, and ours of the same step."""
    callback = PackhorseCallback(tmp_path / "store", folders=True)
    make_trainer(tmp_path / "out", [callback], max_steps=4, **options).train()
    return tmp_path / "out" / "checkpoint-4", restore_checkpoint(callback.store, tmp_path / "ours")


def assert_same_json(found: Path, expected: Path) -> None:
    assert json.loads(found.read_text()) == json.loads(expected.read_text())


@pytest.mark.parametrize("save_only_model", [False, True])
def test_a_folder_has_the_files_of_the_trainer_and_loads(
    save_only_model: bool, tmp_path: Path
) -> None:
    theirs, ours = both(tmp_path, tokenizer=tokenizer(), save_only_model=save_only_model)
    assert files_of(ours) == files_of(theirs)
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= files_of(ours)
    assert bool(TRAINING & files_of(ours)) is not save_only_model
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert_same_json(ours / name, theirs / name)
    for name in ("tokenizer.json", "chat_template.jinja", "model.safetensors"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    model = transformers.AutoModelForCausalLM.from_pretrained(ours)
    assert type(model) is transformers.GPT2LMHeadModel
    expected = transformers.AutoModelForCausalLM.from_pretrained(theirs).state_dict()
    assert all(torch.equal(v, expected[k]) for k, v in model.state_dict().items())
    assert model.lm_head.weight is model.transformer.wte.weight
    assert transformers.AutoTokenizer.from_pretrained(ours).get_vocab() == tokenizer().get_vocab()
    args = torch.load(ours / "training_args.bin", weights_only=False)
    assert args.save_only_model is save_only_model
    names = SnapshotStore(tmp_path / "store").restore("checkpoint-4").keys()
    assert ("optimizer" in names) is not save_only_model


def test_a_run_goes_on_from_a_snapshot_without_optimizer(tmp_path: Path) -> None:
    """With the Trainer's own folder of the same step, the losses are the same."""
    theirs, ours = both(tmp_path, save_only_model=True)
    logs = []
    for name, folder in (("a", theirs), ("b", ours)):
        resumed = make_trainer(tmp_path / name, [], seed=9, save_strategy="no", max_steps=8)
        resumed.train(resume_from_checkpoint=str(folder))
        logs.append(history(resumed)[4:])
    assert logs[0] == logs[1]
    assert sum("loss" in entry for entry in logs[0]) == 4


def adapted(base: Path, name: str = "default") -> Any:
    config = LoraConfig(
        r=2, target_modules=["c_attn"], modules_to_save=["ln_f"], task_type="CAUSAL_LM"
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    return get_peft_model(model, config, adapter_name=name)


@pytest.mark.parametrize("name", ["default", "mine"])
def test_adapters_are_restored_and_resumed(name: str, base: Path, tmp_path: Path) -> None:
    def model() -> Any:
        return adapted(base, name)

    theirs, ours = both(tmp_path, model=model, tokenizer=tokenizer())
    assert files_of(ours) == files_of(theirs)
    place = Path() if name == "default" else Path(name)
    assert_same_json(ours / place / "adapter_config.json", theirs / place / "adapter_config.json")
    file = place / "adapter_model.safetensors"
    assert (ours / file).read_bytes() == (theirs / file).read_bytes()
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    found = PeftModel.from_pretrained(plain, ours / place).state_dict()
    assert any("lora_B" in key and value.any() for key, value in found.items())
    nbytes = sum(path.stat().st_size for path in (tmp_path / "store").rglob("*") if path.is_file())
    assert nbytes < 150_000  # no weight of the base is stored


def test_adapters_resume_to_the_identical_losses(base: Path, tmp_path: Path) -> None:
    def model() -> Any:
        return adapted(base)

    whole = make_trainer(tmp_path / "whole", [], model=model, save_strategy="no")
    whole.train()
    callback = PackhorseCallback(tmp_path / "store")
    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path / "out", [callback, Stop(7)], model=model).train()
    callback.store.close()
    resumed = make_trainer(tmp_path / "out", [callback], seed=77, model=model)
    resumed.train(resume_from_checkpoint=callback.checkpoint())
    assert history(resumed) == history(whole)


def test_adapters_that_transformers_holds(base: Path, tmp_path: Path) -> None:
    def model() -> Any:
        found = transformers.AutoModelForCausalLM.from_pretrained(base)
        found.add_adapter(LoraConfig(r=2, target_modules=["c_attn"]))
        return found

    theirs, ours = both(tmp_path, model=model)
    assert files_of(ours) == files_of(theirs)
    name = "adapter_model.safetensors"
    assert (ours / name).read_bytes() == (theirs / name).read_bytes()


def mixture() -> Any:
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=64, num_local_experts=2, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def test_a_mixture_of_experts_is_restored_in_its_layout_of_memory(tmp_path: Path) -> None:
    """The Trainer writes the layout of the hub, which it then does not resume from."""
    whole = make_trainer(tmp_path / "whole", [], model=mixture, save_strategy="no")
    whole.train()
    callback = PackhorseCallback(tmp_path / "store")
    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path / "out", [callback, Stop(7)], model=mixture).train()
    callback.store.close()
    folder = restore_checkpoint(callback.store, tmp_path / "ours")
    resumed = make_trainer(tmp_path / "out", [callback], seed=77, model=mixture)
    resumed.train(resume_from_checkpoint=str(folder))
    assert history(resumed) == history(whole)
    found = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    stored = callback.store.restore("checkpoint-4", framework="pt", keys="model")["model"]
    assert all(torch.equal(value, stored[name]) for name, value in found.items())


class Own(torch.nn.Module):
    """A model that is not of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Embedding(64, 64)

    def forward(self, input_ids: Any, labels: Any) -> dict[str, Any]:
        return {"loss": torch.nn.functional.cross_entropy(self.inner(input_ids).mT, labels)}


def test_a_model_of_the_callers_own_has_weights_alone(tmp_path: Path) -> None:
    theirs, ours = both(tmp_path, model=Own)
    assert files_of(ours) == files_of(theirs)
    assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()


def test_the_tokenizer_of_a_collator_is_kept(tmp_path: Path) -> None:
    chosen = tokenizer()
    callback = PackhorseCallback(tmp_path / "store", folders=True)
    trainer = make_trainer(tmp_path / "out", [callback], max_steps=2, save_steps=2)
    trainer.data_collator = transformers.DataCollatorForLanguageModeling(chosen, mlm=False)
    trainer.train_dataset = [{"input_ids": row["input_ids"].tolist()} for row in dataset()]
    trainer.train()
    ours = restore_checkpoint(callback.store, tmp_path / "ours")
    assert files_of(ours) == files_of(tmp_path / "out" / "checkpoint-2")
    assert "tokenizer.json" in files_of(ours)


def test_the_best_snapshot_outlives_the_limit(tmp_path: Path) -> None:
    class Scores(transformers.TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            state.best_global_step = 4

    callback = PackhorseCallback(tmp_path / "store")
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "save_total_limit": 2}
    make_trainer(tmp_path / "out", [Scores(), callback], max_steps=12, **options).train()
    assert callback.store.names() == ["checkpoint-4", "checkpoint-12"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hub_strategy": "every_save"}, "'every_save' pushes folders"),
        ({"hub_strategy": "all_checkpoints"}, r"folders=True"),
        ({"hub_strategy": "end"}, None),
        ({"push_to_hub": False, "save_on_each_node": True}, "save_on_each_node has no effect"),
    ],
)
def test_arguments_without_effect_are_warned_about(
    options: dict[str, Any], words: str | None, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path / "out", [callback := PackhorseCallback(tmp_path / "store")])
    for name, value in ({"push_to_hub": True} | options).items():
        setattr(trainer.args, name, value)  # making a trainer with them would reach for the hub
    trainer.args.hub_strategy = transformers.trainer_utils.HubStrategy(trainer.args.hub_strategy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callback.on_train_begin(trainer.args, trainer.state, trainer.control)
    if words is None:
        assert not caught
    else:
        with pytest.warns(UserWarning, match=words):
            callback.on_train_begin(trainer.args, trainer.state, trainer.control)


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/../../evil", "", "..\\evil"])
def test_a_snapshot_writes_nothing_outside_of_its_folder(name: str, tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "store")
    state = {"trainer_state": np.zeros(2, np.uint8), "model": {}, "files": {}, "rng": []}
    for key, value in (("files", np.zeros(3, np.uint8)), ("weights", {"w": torch.zeros(1)})):
        store.take("checkpoint-1", state | {key: {name: value}}, replace=True)
        with pytest.raises(packhorse.CorruptionError, match="is not the path of a file"):
            restore_checkpoint(store, tmp_path / "a" / "b")
        assert {path.name for path in tmp_path.iterdir()} <= {"store", "a"}
