"""Weights that are decoded ahead: the bits are right in any order, and no weight is kept alive.

The lane of these tests is a thread that runs late on purpose. If code does not wait for the lane,
or the lane does not wait for code, one of them reads or writes the wrong weight. On a GPU, the lane
is a stream.
"""

import gc
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor
from weight_samples import model_rows

from packhorse.codecs.weights import WeightArrays, pack, unpack_into
from packhorse.device.ahead import AheadDecoder, current_decoder, decode_ahead
from packhorse.layout import W12


class ThreadLane:
    """Runs work in a thread, in order, each piece a little late."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.late = random.Random(1)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            time.sleep(self.late.random() / 500)
            work()

    def mark(self) -> object:
        done = threading.Event()
        done.set()  # the caller's own work is done when it returns
        return done

    def run_after(self, mark: object, work: Callable[[], object], uses: Sequence[Tensor]) -> object:
        assert isinstance(mark, threading.Event)
        done = threading.Event()
        self._work.put(lambda: (mark.wait(), work(), done.set()))
        return done

    def wait(self, mark: object) -> None:
        assert isinstance(mark, threading.Event)
        assert mark.wait(30)

    def end(self) -> None:
        self._work.put(None)
        self._thread.join()


@pytest.fixture
def lane() -> Iterator[ThreadLane]:
    lane = ThreadLane()
    yield lane
    lane.end()


def arrays_of(n_rows: int, n_columns: int, seed: int) -> list[Tensor]:
    return [torch.from_numpy(a) for a in pack(model_rows(n_rows, n_columns, seed), W12, threads=1)]


def decode(arrays: Sequence[Tensor], out: Tensor) -> None:
    out.fill_(torch.nan)
    dst = out.view(torch.uint16).numpy()
    held = WeightArrays(*(array.numpy() for array in arrays))
    unpack_into(held, W12, out.shape[1], dst, row_start=0, row_stop=out.shape[0], threads=1)


def use(decoder: AheadDecoder, arrays: list[Tensor], shape: tuple[int, int], seed: int) -> None:
    with decoder.plain(arrays, shape, decode) as plain:
        expected = torch.from_numpy(model_rows(*shape, seed).view("int16"))
        assert torch.equal(plain.view(torch.int16), expected)


SHAPES = [(4, 96), (16, 40), (8, 96), (1, 7), (4, 96)]


def test_the_second_pass_finds_all_weights_decoded(lane: ThreadLane) -> None:
    decoder = AheadDecoder(lane)
    weights = [arrays_of(*shape, seed) for seed, shape in enumerate(SHAPES)]
    for n_passes in range(1, 5):
        for seed, shape in enumerate(SHAPES):
            use(decoder, weights[seed], shape, seed)
        n_new = int(n_passes > 1)  # the successor of the last weight
        assert decoder.n_misses == len(SHAPES) + n_new
        assert decoder.n_hits + decoder.n_misses == n_passes * len(SHAPES)


def test_any_order_gives_the_right_weights(lane: ThreadLane) -> None:
    decoder = AheadDecoder(lane)
    weights = [arrays_of(*shape, seed) for seed, shape in enumerate(SHAPES)]
    order = random.Random(5)
    for _ in range(300):
        seed = order.randrange(len(SHAPES))
        use(decoder, weights[seed], SHAPES[seed], seed)
    assert decoder.n_hits > 20
    assert decoder.n_misses > 20


def test_one_weight_alone_is_decoded_each_time(lane: ThreadLane) -> None:
    decoder = AheadDecoder(lane)
    arrays = arrays_of(4, 96, 0)
    for _ in range(3):
        use(decoder, arrays, (4, 96), 0)
    assert (decoder.n_hits, decoder.n_misses) == (0, 3)


def test_weights_are_not_kept_and_not_mistaken_for_new_ones(lane: ThreadLane) -> None:
    """New arrays often get the address and the id of freed ones."""
    decoder = AheadDecoder(lane)
    for seed in range(40):
        pair = [arrays_of(4, 96, seed), arrays_of(4, 96, seed + 1000)]
        for _ in range(2):
            use(decoder, pair[0], (4, 96), seed)
            use(decoder, pair[1], (4, 96), seed + 1000)
        del pair
    lane.end()
    lane.__init__()  # type: ignore[misc]
    gc.collect()
    assert len(decoder._weights) <= 1  # this frame may hold a name of the last pass


def test_a_product_that_fails_leaves_a_decoder_that_works(lane: ThreadLane) -> None:
    decoder = AheadDecoder(lane)
    weights = [arrays_of(4, 96, seed) for seed in range(2)]
    for _ in range(2):
        for seed in range(2):
            use(decoder, weights[seed], (4, 96), seed)
    with (
        pytest.raises(RuntimeError, match="shapes"),
        decoder.plain(weights[0], (4, 96), decode) as plain,
    ):
        torch.nn.functional.linear(torch.ones(2, 5, dtype=torch.bfloat16), plain)
    for seed in (1, 0, 1, 0):
        use(decoder, weights[seed], (4, 96), seed)


def test_nothing_is_decoded_ahead_unless_asked_for() -> None:
    assert current_decoder(torch.device("cuda", 0)) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_each_stream_of_a_gpu_has_its_decoder() -> None:
    device = torch.device("cuda", 0)
    with decode_ahead():
        first = current_decoder(device)
        assert first is not None
        assert current_decoder(device) is first
        with torch.cuda.stream(torch.cuda.Stream(device)):
            assert current_decoder(device) is not first
    assert current_decoder(device) is None
