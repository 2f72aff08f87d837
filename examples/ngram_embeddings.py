"""A language model with tables of n-grams, whose embeddings lie packed in memory of the host.

python examples/ngram_embeddings.py              # its tokens are those of the plain model
"""

import argparse
import copy

import torch
from torch import Tensor, nn

from packhorse.device import pack_model_

WORDS, WIDTH, COLUMNS = 1000, 256, 160


class NgramModel(nn.Module):
    """Each token looks up itself, and the two and three tokens that end with it, by their hash."""

    def __init__(self, n_rows: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.ngrams = nn.ModuleList(nn.Embedding(n_rows, COLUMNS) for _ in range(2))
        self.mix = nn.Linear(WIDTH + 2 * COLUMNS, WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        found, key = [self.words(tokens)], tokens
        for back, table in enumerate(self.ngrams, start=1):
            before = nn.functional.pad(tokens, (back, 0))[:, : tokens.shape[1]]
            key = key * 1_000_003 + before
            found.append(table(key % table.num_embeddings))
        return self.lm_head(torch.relu(self.mix(torch.cat(found, -1))))


@torch.no_grad()
def generate(model: nn.Module, tokens: Tensor, n: int) -> Tensor:
    """Append the likeliest tokens."""
    for _ in range(n):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    return tokens


def main(n_rows: int) -> None:
    """Pack a model, and compare."""
    torch.manual_seed(0)
    plain = NgramModel(n_rows).to(torch.bfloat16).eval()
    model = copy.deepcopy(plain)
    print(pack_model_(model, embeddings="host"))
    # On a machine with a GPU, model.to("cuda") moves all but the rows; these come out there.
    tokens = torch.randint(0, WORDS, (4, 8))
    same = torch.equal(generate(model, tokens, 16), generate(plain, tokens, 16))
    print(f"the tokens are the same: {same}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=20_000)
    main(parser.parse_args().rows)
