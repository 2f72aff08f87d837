"""Runs models in the real vLLM, in this process, one after the other."""

import gc
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

if find_spec("vllm") is None:  # `make test` collects this folder, too
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }


class Served(NamedTuple):
    """What a model has given.

    Attributes:
        tokens: of each prompt.
        logprobs: of those tokens.
        weights: the dtype of each layer's weight, by its name.
        n_packed: how many layers are packed.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    weights: dict[str, str]
    n_packed: int


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the folders of models."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def serve() -> Callable[..., Served]:
    """Loads a folder, and generates for all prompts; the same call runs once."""
    found: dict[str, Served] = {}

    def call(folder: Path, quantization: str | None = None, **options: Any) -> Served:
        key = repr((folder, quantization, sorted(options.items())))
        if key not in found:
            found[key] = run(folder, quantization, **options)
        return found[key]

    return call


def weights_of(model: Any) -> dict[str, str]:
    """Runs in vLLM's worker."""
    return {name: str(each.dtype) for name, each in model.named_parameters()}


def run(folder: Path, quantization: str | None, **options: Any) -> Served:
    from served_models import PROMPTS
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.lora.request import LoRARequest

    adapter, before = options.pop("adapter", None), options.pop("before", None)
    if adapter is not None:
        options |= {"enable_lora": True, "max_lora_rank": 8}
    settings = {
        "dtype": "bfloat16", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 4,
        "skip_tokenizer_init": True, "disable_log_stats": True,
    } | options  # fmt: skip
    llm = None
    try:
        llm = LLM(str(folder), quantization=quantization, **settings)
        if before is not None:
            before(llm)
        params = SamplingParams(
            temperature=0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=1
        )
        prompts: Any = [{"prompt_token_ids": each} for each in PROMPTS]
        request = None if adapter is None else LoRARequest("adapter", 1, str(adapter))
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=request)
        generated = [each.outputs[0] for each in outputs]
        tokens = [list(each.token_ids) for each in generated]
        logprobs = [
            [step[token].logprob for step, token in zip(each.logprobs, each.token_ids, strict=True)]
            for each in generated
        ]
        weights = llm.apply_model(weights_of)[0]
        n_packed = sum(dtype == "torch.uint8" for dtype in weights.values())
        return Served(tokens, logprobs, weights, n_packed)
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
