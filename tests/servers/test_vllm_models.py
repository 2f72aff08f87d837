"""Packed weights in the real vLLM: tokens are those of the plain model (`make test-vllm`)."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from served_models import KINDS, make_adapter, make_folder

METHOD = "packhorse"
N_PACKED = {"dense": 9, "gqa": 9, "moe": 5, "padded": 9, "bias": 9}


def assert_same(found: Any, wanted: Any) -> None:
    assert found.tokens == wanted.tokens
    for ours, theirs in zip(found.logprobs, wanted.logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=0.05)
    assert len({tuple(each) for each in wanted.tokens}) == len(wanted.tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", N_PACKED)
def test_tokens_are_those_of_the_plain_model(
    serve: Callable[..., Any], root: Path, name: str, kind: str
) -> None:
    """A folder with arrays names the method itself."""
    found = serve(make_folder(root, name, kind), None if kind == "arrays" else METHOD)
    assert found.n_packed == N_PACKED[name]
    plain = serve(make_folder(root, name, "plain"))
    assert plain.n_packed == 0
    assert_same(found, plain)
    if name == "moe":
        experts = {dtype for weight, dtype in found.weights.items() if "experts" in weight}
        assert experts == {"torch.bfloat16"}


@pytest.mark.parametrize("name", ["dense", "gqa", "moe"])
def test_compiled_models_give_the_same_tokens(
    serve: Callable[..., Any], root: Path, name: str
) -> None:
    folder = make_folder(root, name, "plain")
    found = serve(folder, METHOD, enforce_eager=False)
    assert found.n_packed == N_PACKED[name]
    assert_same(found, serve(folder, enforce_eager=False))


@pytest.mark.parametrize(
    ("options", "n_packed"),
    [
        ({"fmt": "W11"}, 9),
        ({"modules_to_not_convert": ["q_proj", "model.layers.1.mlp"], "lm_head": False}, 4),
        ({"embeddings": True}, 10),
    ],
)
def test_options_come_from_the_config(
    serve: Callable[..., Any], root: Path, options: dict[str, Any], n_packed: int
) -> None:
    folder = make_folder(root, "dense", "plain")
    config = {"quantization_config": {"quant_method": METHOD, **options}}
    found = serve(folder, hf_overrides=config)
    assert found.n_packed == n_packed
    assert_same(found, serve(folder))


@pytest.mark.parametrize("name", ["dense", "gqa"])
def test_adapters_run_on_top(serve: Callable[..., Any], root: Path, name: str) -> None:
    folder, adapter = make_folder(root, name, "plain"), make_adapter(root, name)
    found = serve(folder, METHOD, adapter=adapter)
    assert found.n_packed == N_PACKED[name]
    wanted = serve(folder, adapter=adapter)
    assert_same(found, wanted)
    assert wanted.tokens != serve(folder).tokens


def test_new_weights_reach_a_running_model(serve: Callable[..., Any], root: Path) -> None:
    """`reload_weights` writes the buffers that compiled code knows."""
    folder, other = make_folder(root, "dense", "plain"), make_folder(root, "dense", "plain", 1)

    def reload(llm: Any) -> None:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})

    found = serve(folder, METHOD, before=reload)
    assert found.n_packed == N_PACKED["dense"]
    assert_same(found, serve(other))
    assert found.tokens != serve(folder).tokens


def test_dummy_weights_load(serve: Callable[..., Any], root: Path) -> None:
    found = serve(make_folder(root, "dense", "plain"), METHOD, load_format="dummy")
    assert len(found.tokens[0]) == 16


# Refusals.


def copy_of(folder: Path, place: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a folder in one file, after a change of its tensors."""
    shutil.copytree(folder, place)
    tensors: dict[str, Any] = {}
    for file in [*place.glob("*.safetensors")]:
        tensors |= load_file(file)
        file.unlink()
    (place / "model.safetensors.index.json").unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    return place


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("name", [UP, "lm_head.weight", "model.layers.0.self_attn.o_proj.weight"])
def test_a_missing_weight_is_an_error(
    serve: Callable[..., Any], root: Path, tmp_path: Path, name: str
) -> None:
    folder = copy_of(
        make_folder(root, "dense", "plain"), tmp_path / "copy", lambda tensors: tensors.pop(name)
    )
    with pytest.raises(Exception, match="the checkpoint does not have all of it"):
        serve(folder, METHOD)


def test_damaged_arrays_are_an_error(serve: Callable[..., Any], root: Path, tmp_path: Path) -> None:
    def damage(tensors: dict[str, Any]) -> None:
        tensors[f"{UP}.exception_starts"][-1] += 1

    folder = copy_of(make_folder(root, "dense", "arrays"), tmp_path / "copy", damage)
    with pytest.raises(Exception, match=UP.replace(".", r"\.")):
        serve(folder)


def test_another_dtype_is_refused(serve: Callable[..., Any], root: Path) -> None:
    with pytest.raises(Exception, match=r"torch\.float16 is not supported for quantization meth"):
        serve(make_folder(root, "dense", "plain"), METHOD, dtype="float16")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": METHOD, "fmt": "W10"}, "format is 'W10'"),
        ({"quant_method": METHOD, "bits": 4}, "has no option 'bits'"),
        ({"quant_method": METHOD, "version": 99}, "upgrade packhorse"),
        ({"quant_method": "gptq"}, "does not match the quantization method"),
    ],
)
def test_wrong_options_are_refused(
    serve: Callable[..., Any], root: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        serve(make_folder(root, "dense", "plain"), METHOD,
              hf_overrides={"quantization_config": config})  # fmt: skip


def test_another_version_of_vllm_is_refused(
    serve: Callable[..., Any], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm

    from packhorse.integrations.plugins import register_vllm

    folder = make_folder(root, "dense", "plain")
    with monkeypatch.context() as patch:
        patch.setattr(vllm, "__version__", "0.31.0")
        register_vllm()
        with pytest.raises(Exception, match=r"supports vLLM 0\.32 to 0\.33, not 0\.31\.0"):
            serve(folder, METHOD, seed=1)
    register_vllm()
    assert serve(folder, METHOD).n_packed == N_PACKED["dense"]


def test_a_layer_of_many_tokens_runs(serve: Callable[..., Any], root: Path) -> None:
    """More tokens than one step of the scheduler takes: the prompt is cut."""
    folder = make_folder(root, "dense", "plain")
    options = {"max_num_batched_tokens": 16, "enable_chunked_prefill": True}
    assert_same(serve(folder, METHOD, **options), serve(folder, **options))
