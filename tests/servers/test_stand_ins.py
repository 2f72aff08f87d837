"""The stand-ins for vLLM that `make test` uses have the signatures of the real classes."""

import inspect
from importlib import import_module
from typing import Any

import pytest
from serving_stubs import vllm_stubs

CLASSES = [
    (path, name)
    for path, names in vllm_stubs.MODULES.items()
    for name in names
    if not name.startswith("_")
]
# Ours take only what Packhorse gives.
SHORTER = {"__init__", "weight_loader"}


def parameters(function: Any) -> list[str]:
    return [str(each.name) for each in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(("path", "name"), CLASSES)
def test_a_stand_in_has_the_signatures_of_the_real_one(path: str, name: str) -> None:
    ours, real = getattr(vllm_stubs, name), getattr(import_module(path), name)
    if inspect.isfunction(ours):
        assert parameters(ours) == parameters(real)
    if not inspect.isclass(ours) or name == "current_platform":
        return
    for member in vars(ours):
        if not callable(getattr(ours, member)) or member.startswith("__"):
            continue
        if member not in SHORTER and member != "forward":
            assert parameters(getattr(ours, member)) == parameters(getattr(real, member)), member
    if name == "WeightsMapper":
        assert set(ours.__dataclass_fields__) == set(real.__dataclass_fields__)


@pytest.mark.parametrize("name", ["is_cuda", "is_cpu", "device_name"])
def test_the_platform_says_what_it_is(name: str) -> None:
    assert hasattr(import_module("vllm.platforms").current_platform, name)


def test_a_config_has_the_parts_that_are_read() -> None:
    from vllm.config import VllmConfig

    config = VllmConfig()
    assert config.load_config.load_format == "auto"
    assert config.offload_config.uva.cpu_offload_gb == 0
    assert config.offload_config.prefetch.offload_group_size == 0
    assert config.scheduler_config.max_num_batched_tokens > 0
    assert hasattr(config.compilation_config, "cudagraph_capture_sizes")


def test_information_of_a_layer_has_the_fields_that_are_read() -> None:
    from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

    assert set(vllm_stubs.LayerReloadingInfo.__dataclass_fields__) <= set(
        LayerReloadingInfo.__dataclass_fields__
    )
