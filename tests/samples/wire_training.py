"""Jobs of ranks that train a small language model by data parallelism, packed and plain."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from packhorse.wire import Collectives, autograd, compression_hook, shard_traffic

WIDTH, VOCABULARY, LENGTH = 64, 97, 24


class Block(torch.nn.Module):
    """Causal attention and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
        self.mix = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (4, -1)).transpose(1, 2)
            for part in self.mix(self.norms[0](x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Model(torch.nn.Module):
    """A language model of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def text(step: int, rank: int) -> torch.Tensor:
    """Tokens with a pattern to learn."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    start = torch.randint(VOCABULARY, (4, 1), generator=generator)
    return (start + 3 * torch.arange(LENGTH + 1)) % VOCABULARY


def optimizers(model: torch.nn.Module, name: str) -> list[torch.optim.Optimizer]:
    """AdamW for all weights, or Muon for the matrices of the blocks."""
    if name == "adamw":
        return [torch.optim.AdamW(model.parameters(), lr=3e-3)]
    matrices = [p for n, p in model.named_parameters() if "blocks" in n and p.dim() == 2]
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    return [torch.optim.Muon(matrices, lr=2e-2), torch.optim.AdamW(others, lr=3e-3)]


def train(model: torch.nn.Module, name: str, n_steps: int) -> list[float]:
    """The losses of some steps of this rank."""
    steppers, losses = optimizers(model, name), []
    for step in range(n_steps):
        tokens = text(step, dist.get_rank())
        logits = model(tokens[:, :-1]).float()
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
        losses.append(loss.item())
    return losses


def digest(model: torch.nn.Module) -> str:
    """Equal only for equal bits of all weights."""
    found = hashlib.sha1()
    for parameter in model.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        found.update(whole.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def ddp(optimizer: str, choice: str, n_steps: int) -> dict[str, Any]:
    """Losses and weights of DDP, without our hook and with it, and how calls ran."""
    found: dict[str, Any] = {}
    for how in ("plain", "packed"):
        model = Model()
        # Small buckets, so that there are several.
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.05)
        collectives = Collectives(choice=choice, timeout=30)
        if how == "packed":
            wrapped.register_comm_hook(collectives, compression_hook)
        found[how] = train(wrapped, optimizer, n_steps), digest(model)
    found["rows"] = [(str(row.key), row.arm.name, row.n_calls) for row in collectives.rows()]
    return found


def fsdp(optimizer: str, choice: str, n_steps: int, is_mixed: bool) -> dict[str, Any]:
    """The same of FSDP2."""
    found: dict[str, Any] = {}
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if is_mixed else None
    options = {} if policy is None else {"mp_policy": policy}
    for how in ("plain", "packed"):
        model = Model()
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        collectives = Collectives(choice=choice, timeout=30)
        if how == "packed":
            found["n_modules"] = shard_traffic(model, collectives, ahead=is_mixed)
        found[how] = train(model, optimizer, n_steps), digest(model)
    found["rows"] = [(str(row.key), row.arm.name, row.n_calls) for row in collectives.rows()]
    return found


def refusals() -> list[str]:
    """What `shard_traffic` and the hooks refuse."""
    collectives, alone = Collectives(timeout=30), dist.new_subgroups(1)[0]
    found = []
    try:
        shard_traffic(Model(), collectives)
    except ValueError as error:
        found.append(str(error))
    model = Model()
    fully_shard(model)
    shard_traffic(model, Collectives(alone, timeout=30))
    try:
        model(text(0, 0)[:, :-1])
    except ValueError as error:
        found.append(str(error))
    return found


def gradients(choice: str) -> list[str]:
    """The differentiable collectives whose result or gradient is wrong."""
    rank, size = dist.get_rank(), dist.get_world_size()
    collectives, bad = Collectives(choice=choice, timeout=30), []
    n = 6000 * size
    xs = [torch.randn(n, 2, generator=torch.Generator().manual_seed(i)) for i in range(size)]
    ws = [torch.randn(n * size, 2, generator=torch.Generator().manual_seed(9 + i))
          for i in range(size)]  # fmt: skip
    rows = n // size

    def check(name: str, output: torch.Tensor, expected: torch.Tensor, x: torch.Tensor,
              gradient: torch.Tensor) -> None:  # fmt: skip
        (output * ws[rank][: output.shape[0]]).sum().backward()
        if not torch.equal(output, expected):
            bad.append(f"{name} on rank {rank}")
        if x.grad is None or not torch.allclose(x.grad, gradient, rtol=1e-6, atol=1e-6):
            bad.append(f"gradient of {name} on rank {rank}")

    def mine() -> torch.Tensor:
        return xs[rank].clone().requires_grad_()

    part = slice(rank * rows, (rank + 1) * rows)
    x = mine()
    weight = torch.cat([w[:n][part] for w in ws])
    expected = torch.cat([one[part] for one in xs])
    check("all_to_all_single", autograd.all_to_all_single(collectives, x), expected, x, weight)
    sent = [10 * (rank + 1 + i) for i in range(size)]
    coming = [10 * (rank + 1 + i) for i in range(size)]
    x = mine()
    output = autograd.all_to_all_single(collectives, x[: sum(sent)], coming, sent)
    starts = [sum(10 * (i + 1 + j) for j in range(rank)) for i in range(size)]
    expected = torch.cat([xs[i][starts[i] :][: coming[i]] for i in range(size)])
    gradient = torch.zeros_like(xs[0])
    gradient[: sum(sent)] = torch.cat([ws[i][starts[i] :][: sent[i]] for i in range(size)])
    check("uneven all_to_all_single", output, expected, x, gradient)
    x = mine()
    output = autograd.all_gather(collectives, x)
    total = torch.stack(ws).sum(0)
    check("all_gather", output, torch.cat(xs), x, total[rank * n : (rank + 1) * n])
    x = mine()
    output = autograd.reduce_scatter(collectives, x, dist.ReduceOp.AVG)
    expected = output.detach()
    if not torch.allclose(expected, torch.stack(xs).mean(0)[part], atol=1e-6):
        bad.append("reduce_scatter")
    check("reduce_scatter", output, expected, x, torch.cat([w[:rows] for w in ws]) / size)
    x = mine()
    output = autograd.all_reduce(collectives, x)
    expected = output.detach()
    check("all_reduce", output, expected, x, torch.stack([w[:n] for w in ws]).sum(0))
    x = mine()
    output = autograd.broadcast(collectives, x, size - 1)
    gradient = torch.stack([w[:n] for w in ws]).sum(0) * (rank == size - 1)
    check("broadcast", output, xs[-1], x, gradient)
    return bad
