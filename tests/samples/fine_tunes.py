"""A fine-tuning of real matrices whose checkpoints have everything that a trainer keeps."""

import ml_dtypes
import numpy as np
import torch
from real_model import real_tensors

__all__ = ["FineTune"]

_MATRICES = {
    "encoder.layer.0.attention.self.query.weight": "layers.0.attention.q_proj.weight",
    "encoder.layer.0.intermediate.dense.weight": "layers.0.mlp.up_proj.weight",
    "encoder.layer.0.intermediate.dense.bias": "layers.0.mlp.up_proj.bias",
}


class FineTune:
    """Matrices of a trained model, trained on with AdamW: fp32 masters, bf16 copies of them, both
    moments, an embedding that is frozen, and an output layer that is tied to it."""

    def __init__(self, rate: float = 1e-4) -> None:
        torch.manual_seed(0)
        tensors = real_tensors(1)
        self.masters = {
            name: torch.nn.Parameter(torch.from_numpy(tensors[key].astype(np.float32)))
            for key, name in _MATRICES.items()
        }
        words = tensors["embeddings.word_embeddings.weight"][:1024]
        self.frozen = np.ascontiguousarray(words)
        self.optimizer = torch.optim.AdamW(self.masters.values(), lr=rate)
        self.n_steps = 0

    def train(self, until: int) -> "FineTune":
        """Train on until a step."""
        query, up, bias = self.masters.values()
        while self.n_steps < until:
            x = torch.randn(64, 384)
            loss = (torch.tanh(x @ query.T) - x.roll(1, 1)).square().mean()
            loss = loss + (torch.relu(x @ up.T + bias).mean(1) - x.mean(1)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.n_steps += 1
        return self

    def state(self) -> dict[str, np.ndarray]:
        """Copies of all tensors by name."""
        state = {"embed_tokens.weight": self.frozen, "lm_head.weight": self.frozen.copy()}
        for name, master in self.masters.items():
            values = master.detach().numpy().copy()
            state[name] = values.astype(ml_dtypes.bfloat16)
            state[f"master.{name}"] = values
            for kind, moment in self.optimizer.state[master].items():
                state[f"optimizer.{name}.{kind}"] = moment.numpy().copy()
        return state
