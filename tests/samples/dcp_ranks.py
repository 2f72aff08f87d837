"""Real process groups for the tests of checkpoints: four processes, started once.

A job is the name of a function of this module. For each job, the processes that take part form a
process group over gloo, and the others wait. The result or error of a rank goes back to the test as
text or plain data.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked import fork_context
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from packhorse.disk import PackhorseReader, PackhorseWriter

WORLD = 4
PLACEMENTS = {"0": Shard(0), "1": Shard(1), "R": Replicate()}


class Ranks:
    """The processes."""

    def __init__(self) -> None:
        context = fork_context()
        self.results = context.Queue()
        self.jobs = [context.Queue() for _ in range(WORLD)]
        self.processes = [
            context.Process(target=serve, args=(rank, self.jobs[rank], self.results), daemon=True)
            for rank in range(WORLD)
        ]
        for process in self.processes:
            process.start()

    def run(self, world: int, job: Callable[..., Any], *args: Any) -> list[Any]:
        """The result of each of `world` ranks; a rank's error becomes an `AssertionError`."""
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(world):
                self.jobs[rank].put((job.__name__, world, f"{folder}/store", args))
            found = dict(self.results.get(timeout=60) for _ in range(world))
        failed = {rank: error for rank, (error, _) in found.items() if error}
        assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
        return [found[rank][1] for rank in range(world)]

    def close(self) -> None:
        for queue in self.jobs:
            queue.put(None)
        for process in self.processes:
            process.join(20)


def serve(rank: int, jobs: Any, results: Any) -> None:
    """The life of a process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    while (job := jobs.get()) is not None:
        name, world, store, args = job
        try:
            dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)
            results.put((rank, ("", globals()[name](*args))))
        except BaseException:
            results.put((rank, (traceback.format_exc(), None)))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def digest(value: Any) -> Any:
    """Something small that is equal only for equal bits: for a tensor, a hash of its bytes."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        flat = value.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
        return (
            str(value.dtype),
            tuple(value.shape),
            hashlib.sha1(flat.numpy().tobytes()).hexdigest(),
        )
    if isinstance(value, dict):
        return {key: digest(item) for key, item in value.items()}
    return [digest(item) for item in value] if isinstance(value, list | tuple) else value


@contextmanager
def failing() -> Iterator[dict[int, str]]:
    """Errors of all ranks by rank, of a save or load that must fail."""
    found: dict[int, str] = {}
    try:
        yield found
    except dcp.api.CheckpointException as error:
        found.update({rank: f"{type(e).__name__}: {e}" for rank, (e, _) in error.failures.items()})
    assert found, "it did not fail"


# A real model with FSDP2 and AdamW.


def make_model(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Embedding(37, 24),
        *(torch.nn.Sequential(torch.nn.Linear(24, 50), torch.nn.GELU(), torch.nn.Linear(50, 24))
          for _ in range(2)),
        torch.nn.LayerNorm(24),
        torch.nn.Linear(24, 37, bias=False),
    )  # fmt: skip
    model[-1].weight = model[0].weight
    for block in model[1:3]:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, n_steps: int) -> list[float]:
    """Losses of some steps, the same on all ranks and for any number of them."""
    losses = []
    for step in range(n_steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(37, (8, 5), generator=generator)
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = sd.get_state_dict(model, optimizer)
    return {"model": weights, "optim": moments, "epoch": 3, "names": ["a", "b"]}


def train_and_save(url: str) -> Any:
    model, optimizer = make_model(0)
    train(model, optimizer, 2)
    state = state_of(model, optimizer)
    dcp.save(state, storage_writer=PackhorseWriter(url, threads=1))
    before = digest(state)
    return before, train(model, optimizer, 2)


def load_and_save(source: str, target: str | None) -> Any:
    """Loads into a fresh model, perhaps saves it again, and trains on."""
    model, optimizer = make_model(1)
    train(model, optimizer, 1)  # so that there are moments, and other ones
    state = state_of(model, optimizer)
    state.update(epoch=0, names=[])
    dcp.load(state, storage_reader=PackhorseReader(source, threads=1))
    sd.set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    found = digest(state)
    if target is not None:
        dcp.save(state, storage_writer=PackhorseWriter(target, threads=1))
    return found, train(model, optimizer, 2)


# Tensors of any sharding.


def sharded(shape: tuple[int, ...], mesh_shape: tuple[int, ...], how: str, seed: int) -> DTensor:
    mesh = init_device_mesh("cpu", mesh_shape)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return distribute_tensor(whole, mesh, [PLACEMENTS[letter] for letter in how])


def save_tensor(
    url: str, shape: tuple[int, ...], mesh: tuple[int, ...], how: str, seed: int = 0, **more: Any
) -> None:
    state = {"x": sharded(shape, mesh, how, seed), "plain": torch.arange(9.0), "n": 5}
    dcp.save(state, storage_writer=PackhorseWriter(url, threads=1, **more))


def save_tensor_again(url: str) -> None:
    save_tensor(url, (64, 32), (dist.get_world_size(),), "0", overwrite=True)


def load_tensor(url: str, shape: tuple[int, ...], mesh: tuple[int, ...], how: str) -> Any:
    """The digest of the loaded state, and the cost of loading it on this rank."""
    state = {"x": sharded(shape, mesh, how, 99), "plain": torch.zeros(9), "n": 0}
    reader = PackhorseReader(url, threads=1)
    dcp.load(state, storage_reader=reader)
    assert (state["n"], state["plain"].sum().item()) == (5, 36.0)
    return digest(state["x"]), asdict(reader.stats)


def sharded_step(number: int) -> dict[str, Any]:
    """A state in training, which moves a little at each step."""
    x = sharded((256, 300), (dist.get_world_size(),), "0", 0)
    for i in range(number):
        x = x + sharded((256, 300), (dist.get_world_size(),), "0", i + 1) * 1e-5
    return {"x": x, "plain": torch.arange(9.0), "n": 5}


def save_step(url: str, base: str | None, number: int) -> None:
    writer = PackhorseWriter(url, base=base, threads=1)
    dcp.save(sharded_step(number), storage_writer=writer)


def expected_step(number: int) -> Any:
    return digest(sharded_step(number)["x"])


def mixed_step(number: int) -> dict[str, Any]:
    """A state of mixed precision, whose model is a rounded copy of the optimizer's weights."""
    master = sharded_step(number)["x"]
    return {"model": {"x": master.bfloat16()}, "master": {"x": master}}


def save_mixed(url: str, base: str | None, number: int) -> None:
    dcp.save(mixed_step(number), storage_writer=PackhorseWriter(url, base=base, threads=1))


def load_mixed(url: str, number: int) -> bool:
    """Whether the loaded state is that of this step."""
    found = mixed_step(number + 1)
    dcp.load(found, storage_reader=PackhorseReader(url, threads=1))
    wanted = mixed_step(number)
    return all(
        torch.equal(found[part]["x"].full_tensor(), wanted[part]["x"].full_tensor())
        for part in wanted
    )


def save_async(url: str) -> None:
    state = {"x": sharded((64, 32), (dist.get_world_size(),), "0", 7), "plain": torch.arange(9.0)}
    state["n"] = 5
    future = dcp.async_save(state, storage_writer=PackhorseWriter(url, threads=1))
    for value in (state["x"].to_local(), state["plain"]):
        value.zero_()  # as training goes on
    future.result()


def save_async_in_process(url: str) -> None:
    """Runs in a separate program, because PyTorch starts another process, which a daemon may not
    do."""
    os.environ.update(MASTER_ADDR="localhost", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
        state = {"x": sharded((64, 32), (1,), "0", 7), "plain": torch.arange(9.0), "n": 5}
        kind = dcp.state_dict_saver.AsyncCheckpointerType.PROCESS
        writer = PackhorseWriter(url, threads=1)
        dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind).result()
        dist.destroy_process_group()


class FailingPlanner(DefaultSavePlanner):
    """Loses a tensor on the last rank, after others were written."""

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "x" and dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError("the device is gone")
        return super().resolve_data(write_item)


def save_badly(url: str) -> Any:
    state = {"x": sharded((64, 32), (dist.get_world_size(),), "0", 8), "plain": torch.arange(9.0)}
    writer = PackhorseWriter(url, threads=1, overwrite=True)
    with failing() as errors:
        dcp.save(state, storage_writer=writer, planner=FailingPlanner())
    return errors


def load_damaged(url: str) -> Any:
    """The errors, and whether any rank touched a tensor."""
    state = {"x": sharded((64, 32), (dist.get_world_size(),), "0", 99)}
    before = digest(state["x"].to_local())
    with failing() as errors:
        dcp.load(state, storage_reader=PackhorseReader(url, threads=1))
    return errors, digest(state["x"].to_local()) == before


def save_and_load_alone(url: str) -> Any:
    """Each rank saves its own checkpoint in one folder, without communication."""
    rank = dist.get_rank()
    state = {"x": torch.full((100,), float(rank)), "rank": rank}
    for _ in range(2):
        writer = PackhorseWriter(url, overwrite=True)
        dcp.save(state, storage_writer=writer, use_collectives=False)
    dist.barrier()
    found = {"x": torch.zeros(100), "rank": -1}
    dcp.load(found, storage_reader=PackhorseReader(url))
    return found["rank"], found["x"].unique().tolist()


# Processes that will be killed.


def save_until_killed(url: str, reports: Any, first: int) -> None:
    """Saves one state after the other over the previous one, and reports each save."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for number in range(first, first + 1000):
        writer = PackhorseWriter(url, threads=1, overwrite=True)
        dcp.save(numbered_state(number), storage_writer=writer)
        reports.send(number)


def numbered_state(number: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    return {
        **{f"w{i}": torch.randn(40, 50, generator=generator) for i in range(8)},
        "number": number,
    }


def files_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


if __name__ == "__main__":
    save_async_in_process(sys.argv[1])
