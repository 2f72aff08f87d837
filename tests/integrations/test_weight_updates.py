"""Weight updates in vLLM, verl, NeMo-RL, SGLang and SkyRL, on stand-ins with their signatures."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import update_stubs as stubs
import zstandard
from update_samples import masters, train_step, trained_state

from packhorse.errors import CorruptionError, PeerError
from packhorse.integrations.weight_updates import skyrl
from packhorse.integrations.weight_updates import verl as verl_engine
from packhorse.integrations.weight_updates import vllm as vllm_engine
from packhorse.integrations.weight_updates.links import Follower, open_publisher
from packhorse.integrations.weight_updates.sglang import LOAD_FORMAT, as_named_tensor
from packhorse.wire.updates import DeltaReceiver, DeltaSender, UpdateMismatchError

NEMO_ENGINE = "packhorse.integrations.weight_updates.nemo_rl:DeltaCheckpointEngine"
TIMEOUT_S = 20.0


@pytest.fixture(autouse=True)
def frameworks() -> Iterator[None]:
    with stubs.installed():
        yield


class Weights:
    """A trainer's weights, as names and tensors."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.state = {
            name: (torch.randn(shape, generator=generator) * 0.02).bfloat16()
            for name, shape in (("q", (64, 64)), ("k", (64, 64)), ("norm", (64,)))
        }

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields tensors in memory that the next one overwrites, as gathering ones do."""
        memory = torch.empty(64 * 64, dtype=torch.bfloat16)
        for name, tensor in self.state.items():
            shown = memory[: tensor.numel()].view(tensor.shape)
            shown.copy_(tensor)
            yield name, shown
        memory.fill_(-1)

    def step(self, *names: str) -> None:
        for name in names or self.state:
            self.state[name].view(-1)[::50] += 0.25


def matches(model: stubs.FusedModel, weights: Weights) -> bool:
    found = model.checkpoint()
    return all(torch.equal(found[name], weights.state[name]) for name in found)


@pytest.fixture(params=["tcp", "folder"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "tcp://127.0.0.1:0" if request.param == "tcp" else str(tmp_path / "updates")


def vllm_pair(url: str, weights: Weights, **options: Any) -> tuple[Any, list[stubs.Worker]]:
    vllm_engine.register()
    vllm_engine.register()  # again does nothing
    workers = [stubs.Worker(), stubs.Worker()]
    info = vllm_engine.TrainerInitInfo(url=url, timeout=TIMEOUT_S, **options)
    trainer = stubs.WeightTransferTrainerFactory.trainer_init(
        info, client=stubs.WorkerClient(workers), source=weights
    )
    return trainer, workers


def test_vllm_workers_follow_a_trainer(url: str) -> None:
    weights = Weights()
    trainer, workers = vllm_pair(url, weights)
    try:
        for _ in range(3):
            trainer.send_weights()
            assert all(matches(worker.model, weights) for worker in workers)
            assert all(worker.model.loaded == ["k", "norm", "q"] for worker in workers)
            assert not workers[0].model.is_reloading
            weights.step()
        assert trainer.client.calls == ["start", "update", "finish"] * 3
        other = vllm_engine.TrainerInitInfo(rank=1)
        idle = vllm_engine.DeltaTrainerEngine.trainer_init(
            None, other, client=None, source=weights
        )  # as vLLM 0.29 calls it
        idle.send_weights()
    finally:
        for worker in workers:
            worker.engine.shutdown()
        trainer.shutdown()


def test_vllm_can_write_changes_only(tmp_path: Path) -> None:
    weights = Weights()
    trainer, workers = vllm_pair(str(tmp_path), weights, apply="patches")
    trainer.send_weights()
    weights.step("k")
    trainer.send_weights()
    assert workers[0].model.loaded == ["k", "norm", "q", "patch of k"]
    assert matches(workers[1].model, weights)


def test_vllm_loads_everything_after_a_failure(tmp_path: Path) -> None:
    weights = Weights()
    trainer, workers = vllm_pair(str(tmp_path), weights, apply="patches")
    trainer.send_weights()
    broken = workers[1].model
    weights.step()
    place = broken.place

    def failing(name: str) -> torch.Tensor:
        if name == "q":
            raise RuntimeError("the device is lost")
        return place(name)

    broken.place = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the device is lost"):
        trainer.send_weights()
    broken.place = place  # type: ignore[method-assign]
    weights.step()
    trainer.send_weights()
    assert broken.loaded[-3:] == ["k", "norm", "q"]
    assert all(matches(worker.model, weights) for worker in workers)


def test_vllm_does_not_touch_the_model_for_a_bad_update(tmp_path: Path) -> None:
    weights = Weights()
    trainer, workers = vllm_pair(str(tmp_path), weights)
    trainer.send_weights()
    before = workers[0].model.checkpoint()
    weights.step()
    publish = trainer._publisher.publish

    def damaging(update: Any) -> None:
        publish(update)
        path = next(tmp_path.rglob("*.delta"))
        data = bytearray(path.read_bytes())
        data[-80] ^= 1
        path.unlink()
        path.write_bytes(data)

    trainer._publisher.publish = damaging
    with pytest.raises(CorruptionError):
        trainer.send_weights()
    assert all(torch.equal(before[name], t) for name, t in workers[0].model.checkpoint().items())
    assert not workers[0].model.is_reloading


def test_vllm_follows_a_trainer_that_starts_again(url: str) -> None:
    """The new trainer's first version has the number of one that is loaded already."""
    weights = Weights()
    trainer, workers = vllm_pair(url, weights)
    trainer.send_weights()
    trainer.shutdown()
    other = Weights(1)
    info = vllm_engine.TrainerInitInfo(url=url, timeout=TIMEOUT_S)
    again = vllm_engine.DeltaTrainerEngine.trainer_init(info, client=trainer.client, source=other)
    again.send_weights()
    assert all(matches(worker.model, other) for worker in workers)
    repeated = {"version": 1, "stream": workers[0].engine._mirror.receiver.stream_id.hex()}
    workers[0].model.loaded = []
    workers[0].update_weights(repeated)
    assert workers[0].model.loaded == []
    for worker in workers:
        worker.engine.shutdown()
    again.shutdown()


def test_earlier_vllm_passes_a_loader_instead_of_a_model(tmp_path: Path) -> None:
    weights, model = Weights(), stubs.FusedModel()
    engine = vllm_engine.DeltaWeightTransferEngine("config", "parallel config")
    publisher, seen = open_publisher(str(tmp_path))
    update = DeltaSender(weights.state).pack()
    publisher.publish(update)
    told = engine.parse_update_info({"version": 1, "stream": update.stream_id.hex()})
    with pytest.raises(ValueError, match="must be called first"):
        engine.receive_weights(told)
    engine.init_transfer_engine(engine.parse_init_info({"url": seen}))
    with pytest.raises(ValueError, match="neither a model nor a loader"):
        engine.receive_weights(told)
    engine.receive_weights(told, load_weights=model.load_weights)
    assert matches(model, weights)
    for fields in ({}, {"url": "x", "more": 1}, {"url": "x", "apply": "fast"}):
        with pytest.raises(ValueError, match=r"InitInfo|apply"):
            engine.parse_init_info(fields)


class Verl:
    """The part of verl's manager that drives engines: two trainers, two rollouts."""

    def __init__(self, **kwargs: Any) -> None:
        verl_engine.register()
        new = stubs.CheckpointEngineRegistry.new
        self.trainers = [
            new("packhorse", is_master=rank == 0, bucket_size=1 << 20, **kwargs)
            for rank in range(2)
        ]
        self.rollouts = [new("packhorse", bucket_size=1 << 20, **kwargs) for _ in range(2)]
        self.models = [stubs.FusedModel(), stubs.FusedModel()]

    def update(self, weights: Weights) -> None:
        metadata = [engine.prepare() for engine in (*self.trainers, *self.rollouts)]
        kinds = stubs.CheckpointEngineRegistry._registry["packhorse"]
        told, heard = kinds.build_topology(2, 2, metadata)
        for engines, arguments in ((self.trainers, told), (self.rollouts, heard)):
            for i, engine in enumerate(engines):
                engine.init_process_group(**{key: each[i] for key, each in arguments.items()})
        asyncio.run(self._move(weights))
        for engine in (*self.trainers, *self.rollouts):
            engine.finalize()

    async def _move(self, weights: Weights) -> None:
        sending = [engine.send_weights(iter(weights), global_steps=1) for engine in self.trainers]
        pairs = zip(self.rollouts, self.models, strict=True)
        await asyncio.gather(*sending, *[self._load(*pair) for pair in pairs])

    async def _load(self, engine: Any, model: stubs.FusedModel) -> None:
        assert engine.wire_format == "named_tensors"
        received = [pair async for pair in engine.receive_weights(global_steps=1)]
        model.load_weights(received)

    def close(self) -> None:
        for engine in (*self.rollouts, *self.trainers):
            engine.close()


@pytest.mark.parametrize("only_changed", [False, True])
def test_verl_moves_changes(url: str, only_changed: bool) -> None:
    weights, fleet = Weights(), Verl(url=url, only_changed=only_changed, timeout=TIMEOUT_S)
    for step in range(3):
        fleet.update(weights)
        assert all(matches(model, weights) for model in fleet.models)
        changed = ["k", "norm", "q"]  # they share a frame, being small
        assert fleet.models[0].loaded == changed, step
        weights.step("k")
    restarted = Verl(url=url, only_changed=only_changed, timeout=TIMEOUT_S)
    fleet.trainers[0].close()
    other = Weights(3)
    fleet.trainers = restarted.trainers
    fleet.update(other)
    assert all(matches(model, other) for model in fleet.models)
    fleet.close()


def test_verl_needs_a_trainer_with_the_same_backend() -> None:
    with pytest.raises(ValueError, match="no trainer has told"):
        verl_engine.DeltaCheckpointEngine.build_topology(1, 1, [{}, {}])
    engine = verl_engine.DeltaCheckpointEngine()
    with pytest.raises(ValueError, match="was not connected"):
        asyncio.run(anext(engine.receive_weights()))


def test_nemo_rl_moves_changes_in_batches(tmp_path: Path) -> None:
    weights = Weights()
    engines = [
        stubs.create_checkpoint_engine(
            NEMO_ENGINE,
            bucket_size_bytes=64 * 64 * 2,
            engine_kwargs={
                "url": str(tmp_path), "timeout": TIMEOUT_S, "release_after_refit": False,
            },
        )
        for _ in range(3)
    ]  # fmt: skip
    first, second, rollout = engines
    metadata = [{**engine.prepare(), "rank": rank} for rank, engine in enumerate(engines)]
    sizes = {"train_world_size": 2, "rollout_world_size": 1, "metadata": metadata}
    for rank, engine in enumerate((first, second)):
        engine.init_policy_process_group(worker_rank=rank, **sizes)
    rollout.init_rollout_process_group(rollout_rank=0, **sizes)
    model = stubs.FusedModel()

    async def move() -> list[list[str]]:
        batches = []
        sending = [engine.send_weights(iter(weights)) for engine in (first, second)]
        await asyncio.gather(*sending)
        async for batch in rollout.receive_weight_batches():
            model.load_weights(batch)
            batches.append([name for name, _ in batch])
        return batches

    for _ in range(3):
        assert asyncio.run(move()) == [["k"], ["norm"], ["q"]]
        assert matches(model, weights)
        weights.step()
        for engine in engines:
            engine.finalize()
    with pytest.raises(ValueError, match="release_after_refit is set"):
        stubs.create_checkpoint_engine(
            NEMO_ENGINE,
            bucket_size_bytes=1,
            engine_kwargs={"url": "x", "release_after_refit": True},
        )


def test_sglang_loads_an_update() -> None:
    weights, model = Weights(), stubs.FusedModel()
    sender = DeltaSender(weights.state)
    updates = []
    for _ in range(4):
        updates.append(sender.pack())
        weights.step("q")
    for update in updates[:2]:
        stubs.update_weights_from_tensor(model, [as_named_tensor(update)], LOAD_FORMAT)
    before = model.checkpoint()
    with pytest.raises(UpdateMismatchError, match="held already"):
        stubs.update_weights_from_tensor(model, [as_named_tensor(updates[1])], LOAD_FORMAT)
    with pytest.raises(ValueError, match=r"'packhorse\.update' is needed"):
        stubs.update_weights_from_tensor(model, [("q", weights.state["q"])], LOAD_FORMAT)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.checkpoint().items())
    rest = [as_named_tensor(update) for update in updates[2:]]
    stubs.update_weights_from_tensor(model, rest, LOAD_FORMAT)
    receiver = DeltaReceiver(framework="pt")
    receiver.unpack(updates)
    found = model.checkpoint()
    assert all(torch.equal(found[name], tensor) for name, tensor in receiver.state.items())


def test_skyrl_takes_our_codec() -> None:
    skyrl.install()
    for name in skyrl._MODULES:
        assert sys.modules[name].compress_bytes is skyrl.compress_bytes
        assert sys.modules[name].decompress_bytes is skyrl.decompress_bytes
    weights = masters(1)
    before = trained_state(weights)
    train_step(weights, 1e-6, 0)
    after = trained_state(weights)
    ours = theirs = 0
    for name, old in before.items():
        both = old.view(np.uint16) ^ after[name].view(np.uint16)
        packed = skyrl.compress_bytes(both.tobytes())
        assert skyrl.decompress_bytes(packed, both.nbytes) == both.tobytes()
        ours += len(packed)
        theirs += len(zstandard.ZstdCompressor(level=3).compress(both.tobytes()))
    assert ours < theirs
    for level, data in ((1, b"odd"), (10, b"even"), (3, b"")):
        assert skyrl.decompress_bytes(skyrl.compress_bytes(data, level), len(data)) == data
    with pytest.raises(ValueError, match="5 bytes are expected, the frame has 4"):
        skyrl.decompress_bytes(skyrl.compress_bytes(b"even"), 5)
    with pytest.raises(CorruptionError):
        skyrl.decompress_bytes(b"x" * 200)


def test_a_follower_does_not_wait_forever(url: str) -> None:
    publisher, seen = open_publisher(url)
    update = DeltaSender({"w": torch.zeros(3)}).pack()
    publisher.publish(update)
    follower = Follower(seen, timeout=0.3)
    receiver = DeltaReceiver(framework="pt")
    with pytest.raises(PeerError, match="version 2 did not come from"):
        follower.stage(receiver, update.stream_id, 2)
    with pytest.raises(PeerError, match="version 1 did not come from"):
        follower.stage(receiver, bytes(16), 1)
    assert follower.stage(receiver, update.stream_id, 1).version == 1
    follower.close()
    if hasattr(publisher, "close"):
        publisher.close()


def test_a_url_of_a_server_names_a_host() -> None:
    with pytest.raises(ValueError, match="names no host"):
        open_publisher("tcp://:1")
