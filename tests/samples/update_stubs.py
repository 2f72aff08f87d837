"""Stand-ins for the frameworks that take weight updates, with the signatures of the real ones.

Read from: vLLM 0.32.0 (vllm/distributed/weight_transfer/factory.py and base.py, v1/worker/
gpu_worker.py, model_executor/model_loader/checkpoint_weight_patch.py), verl 0.9.1 (verl/
checkpoint_engine/base.py), NeMo-RL of 2026-08-22 (nemo_rl/utils/checkpoint_engines/base.py),
SGLang 0.5.23 (srt/model_executor/model_runner_components/weight_updater.py), SkyRL of 2026-08
(skyrl/backends/skyrl_train/weight_sync/delta_payload.py). They are in `sys.modules` only inside of
`installed`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
import zstandard

__all__ = ["FusedModel", "Worker", "WorkerClient", "create_checkpoint_engine", "installed",
           "update_weights_from_tensor"]  # fmt: skip


class FusedModel(torch.nn.Module):
    """A model of an engine: it has query and key joined in one tensor, transposed, so that names
    and places differ from those of the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(64, 128, dtype=torch.bfloat16), False)
        self.norm = torch.nn.Parameter(torch.zeros(64, dtype=torch.bfloat16), False)
        self.loaded: list[str] = []
        self.fail_at: str | None = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load tensors by their names in the checkpoint."""
        self.loaded = []
        for name, tensor in weights:
            if name == self.fail_at:
                raise RuntimeError(f"cannot load {name}")
            self.place(name).copy_(tensor)
            self.loaded.append(name)
        return set(self.loaded)

    def place(self, name: str) -> torch.Tensor:
        """Where a tensor of the checkpoint is."""
        return {"q": self.qk[:, :64].t(), "k": self.qk[:, 64:].t(), "norm": self.norm}[name]

    def checkpoint(self) -> dict[str, torch.Tensor]:
        """All tensors as the checkpoint has them."""
        return {name: self.place(name).clone() for name in ("k", "norm", "q")}


class _Factory:
    """The registry of both of vLLM's factories."""

    _registry: ClassVar[dict[str, Callable[[], Any]]] = {}

    @classmethod
    def register_engine(cls, name: str, module_path_or_cls: Any, class_name: Any = None) -> None:
        if name in cls._registry:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        cls._registry[name] = lambda: module_path_or_cls


class WeightTransferEngineFactory(_Factory):
    _registry: ClassVar[dict[str, Callable[[], Any]]] = {}

    @classmethod
    def create_engine(cls, config: Any, vllm_config: Any, device: Any, model: Any) -> Any:
        return cls._registry[config.backend]()(config, vllm_config, device, model)


class WeightTransferTrainerFactory(_Factory):
    _registry: ClassVar[dict[str, Callable[[], Any]]] = {}

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
        engine = cls._registry[init_info.backend]()
        return engine.trainer_init(init_info=init_info, client=client, source=source)


class CheckpointWeightPatch(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor
    indices: torch.Tensor | None = None


def load_checkpoint_weight_patches(model: Any, patches: Iterable[CheckpointWeightPatch]) -> None:
    for patch in patches:
        assert patch.indices is not None
        assert patch.indices.dtype == torch.int32
        dense = model.place(patch.name).clone().reshape(-1)
        dense[patch.indices.long()] = patch.values
        model.place(patch.name).copy_(dense.view(patch.shape))
        model.loaded.append(f"patch of {patch.name}")


def initialize_layerwise_reload(model: Any) -> None:
    assert not getattr(model, "is_reloading", False)
    model.is_reloading = True


def finalize_layerwise_reload(model: Any, model_config: Any) -> None:
    assert model.is_reloading
    model.is_reloading = False


class Worker:
    """vLLM's worker, as far as it drives an engine."""

    def __init__(self) -> None:
        config = SimpleNamespace(backend="packhorse")
        vllm_config = SimpleNamespace(model_config=SimpleNamespace(), parallel_config=None)
        self.model = FusedModel()
        self.engine = WeightTransferEngineFactory.create_engine(
            config, vllm_config, torch.device("cpu"), self.model
        )

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        try:
            self.engine.update_weights(update_info)
        except BaseException:
            self.engine.reset_weight_update_target()
            raise


class WorkerClient:
    """vLLM's client for trainers, in one process with the workers."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers
        self.calls: list[str] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        for worker in self.workers:
            worker.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self.calls.append("start")
        for worker in self.workers:
            worker.engine.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append("update")
        for worker in self.workers:
            worker.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")
        for worker in self.workers:
            worker.engine.finish_weight_update()
            worker.engine.reset_weight_update_target()


class CheckpointEngineRegistry:
    """verl's registry."""

    _registry: ClassVar[dict[str, Any]] = {}

    def register(backend: str) -> Any:  # type: ignore[misc]
        def wrapper(cls: Any) -> Any:
            CheckpointEngineRegistry._registry[backend] = cls
            return cls

        return wrapper

    @classmethod
    def new(cls, backend: str, *args: Any, **kwargs: Any) -> Any:
        return cls._registry[backend](*args, **kwargs)


def create_checkpoint_engine(
    backend: str, *, bucket_size_bytes: int, engine_kwargs: dict[str, Any]
) -> Any:
    """As NeMo-RL's."""
    module, _, name = backend.partition(":")
    return getattr(import_module(module), name)(bucket_size=bucket_size_bytes, **engine_kwargs)


def update_weights_from_tensor(
    model: Any, named_tensors: list[tuple[str, torch.Tensor]], load_format: str
) -> None:
    """What SGLang does with tensors for a loader that it was given by name."""
    module, _, name = load_format.rpartition(".")
    getattr(import_module(module), name)(model, named_tensors)


def compress_bytes(data: bytes, level: int = 3) -> bytes:
    return zstandard.ZstdCompressor(level=level).compress(data)


def decompress_bytes(data: bytes, expected_size: int | None = None) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data, max_output_size=expected_size or 0)


_MODULES: dict[str, tuple[Any, ...]] = {
    "vllm.distributed.weight_transfer.factory": (
        WeightTransferEngineFactory, WeightTransferTrainerFactory,
    ),
    "vllm.model_executor.model_loader.reload": (
        initialize_layerwise_reload, finalize_layerwise_reload,
    ),
    "vllm.model_executor.model_loader.checkpoint_weight_patch": (
        CheckpointWeightPatch, load_checkpoint_weight_patches,
    ),
    "verl.checkpoint_engine": (CheckpointEngineRegistry,),
    "skyrl.backends.skyrl_train.weight_sync.delta_payload": (compress_bytes, decompress_bytes),
    "skyrl.backends.skyrl_train.weight_sync.delta_checkpoint": (compress_bytes, decompress_bytes),
}  # fmt: skip


@contextmanager
def installed() -> Iterator[None]:
    """Makes the stand-ins importable, with empty registries, and forgets them afterwards."""
    for registry in (WeightTransferEngineFactory, WeightTransferTrainerFactory,
                     CheckpointEngineRegistry):  # fmt: skip
        registry._registry.clear()
    for path, members in _MODULES.items():
        module = ModuleType(path)
        module.__dict__.update({member.__name__: member for member in members})
        sys.modules[path] = module
    try:
        yield
    finally:
        for path in _MODULES:
            del sys.modules[path]
