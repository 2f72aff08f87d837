"""Real keys and values: of a sentence model with learned positions, and, where
`benchmarks/training.py` has run, of a small language model with rotary positions. The text is the
sources of Python's standard library."""

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.data import sets
from benchmarks.data.language_model import Cache, LanguageModel, ModelShape
from benchmarks.data.vocabulary import Vocabulary

__all__ = ["States", "make"]

CONTEXT = 512  # of the sentence model; the language model gets the same number


class States(NamedTuple):
    """Keys and values of a model.

    Attributes:
        model: which one.
        layers: keys and values of each layer, FP32, (sequences, heads, tokens, size of a head).
    """

    model: str
    layers: list[tuple[Tensor, Tensor]]


def make(n_sequences: int) -> Iterator[States]:
    """Keys and values of all models that are there."""
    yield States("MiniLM", _sentence_model(n_sequences))
    if (sets.training_folder() / sets.TRAINING_MANIFEST).is_file():
        yield States("small language model", _language_model(n_sequences))


@torch.inference_mode()
def _sentence_model(n_sequences: int) -> list[tuple[Tensor, Tensor]]:
    from tokenizers import Tokenizer
    from transformers import BertModel

    folder = sets.model_path().parent
    model = BertModel.from_pretrained(folder).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    text = " ".join(islice(sets.library_sources(), 3 * n_sequences))
    ids = torch.tensor(tokenizer.encode(text).ids[: n_sequences * CONTEXT]).view(n_sequences, -1)
    found: list[Tensor] = []
    for layer in model.encoder.layer:
        for name in ("key", "value"):
            linear = getattr(layer.attention.self, name)
            linear.register_forward_hook(lambda *call: found.append(call[2]))
    model(ids)
    n_heads = model.config.num_attention_heads
    states = [each.unflatten(2, (n_heads, -1)).transpose(1, 2).contiguous() for each in found]
    return list(zip(states[::2], states[1::2], strict=True))


@torch.inference_mode()
def _language_model(n_sequences: int) -> list[tuple[Tensor, Tensor]]:
    shape = ModelShape()
    texts = [text.encode() for text in sets.library_sources()]
    ids = Vocabulary.of(texts, shape.vocabulary).encode(texts[: 3 * n_sequences])
    model = LanguageModel(shape, seed=0)
    tensors = sets.training_tensors("w32", None, "F32", np.float32)
    model.load_state_dict({name: torch.tensor(array) for name, array in tensors.items()})
    cache = Cache()
    wanted = torch.from_numpy(ids[: n_sequences * CONTEXT].astype(np.int64))
    model.logits(wanted.view(n_sequences, -1), cache)
    return [(keys.contiguous(), values.contiguous()) for keys, values in cache.layers]
