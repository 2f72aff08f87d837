"""Text to token ids, by a vocabulary of frequent words that is made from the text itself.

The first 256 ids are the bytes; the others are the most frequent words of two bytes or more. A word
that is not in the vocabulary is cut from its left into the longest pieces that are. So every text
has ids, the ids follow Zipf's law as those of a real tokenizer do, and the same text gives the same
vocabulary everywhere. A word includes the space in front of it; a line break includes the
indentation after it.
"""

import re
from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

__all__ = ["Vocabulary"]

_WORD = re.compile(
    rb"\n[ \t]*| ?_*[A-Za-z]+|[0-9]{1,3}| ?[^\sA-Za-z0-9]+|[ \t\r\f\v]+|[^\x00-\x7f]+"
)
N_BYTES = 256


class Vocabulary:
    """Words and their ids.

    Attributes:
        words: the word of each id; the first 256 are the single bytes in order.
    """

    def __init__(self, words: list[bytes]) -> None:
        """Number the words.

        Args:
            words: all words, the 256 single bytes first.
        """
        self.words = words
        self._ids = {word: i for i, word in enumerate(words)}
        self._longest = max(map(len, words))

    @classmethod
    def of(cls, texts: Iterable[bytes], size: int) -> "Vocabulary":
        """The most frequent words of the texts; equally frequent words are in byte order.

        Args:
            texts: the texts in which words are counted.
            size: number of ids; at least 256.
        """
        counts: Counter[bytes] = Counter()
        for text in texts:
            counts.update(_WORD.findall(text))
        ranked = sorted((-n, word) for word, n in counts.items() if len(word) > 1)
        frequent = [word for _, word in ranked[: size - N_BYTES]]
        return cls([bytes([i]) for i in range(N_BYTES)] + frequent)

    def encode(self, texts: Iterable[bytes]) -> NDArray[np.int32]:
        """The ids of all texts end to end, shape (n,), int32."""
        known = {word: (i,) for word, i in self._ids.items()}
        out: list[int] = []
        for text in texts:
            for word in _WORD.findall(text):
                ids = known.get(word)
                if ids is None:
                    ids = known[word] = tuple(self._cut(word))
                out.extend(ids)
        return np.array(out, np.int32)

    def decode(self, ids: Iterable[int]) -> bytes:
        """The text of the ids."""
        return b"".join(self.words[i] for i in ids)

    def _cut(self, word: bytes) -> list[int]:
        out = []
        start = 0
        while start < len(word):
            end = min(len(word), start + self._longest)
            while word[start:end] not in self._ids:
                end -= 1
            out.append(self._ids[word[start:end]])
            start = end
        return out
