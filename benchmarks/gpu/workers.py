"""Distribute work of gpu.py among processes: work of the host, but never anything that is timed.

Compiling a kernel takes a second or two, and a run needs hundreds. So checks are distributed among
processes, each with its own context on the GPU, so that a fault ends only that process. The
divisions that a search is likely to measure are run once on a few rows before it begins: compiled
kernels are kept on disk, where the process that measures finds them.
"""

import math
import multiprocessing
import os
import random
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from benchmarks.gpu.predictions import Shape
from packhorse.device.autotune import predictor, tune
from packhorse.device.matrix_tuning import pack_on, random_weight
from packhorse.device.products import run_choice
from packhorse.device.strategy import Choice
from packhorse.gpu.models import DeviceModel
from packhorse.gpu.search import Search
from packhorse.kernels.arrays import WeightTensors
from packhorse.kernels.stream_product import StreamConfig, stream_options
from packhorse.layout import WEIGHT_FORMATS, WeightFormat

if TYPE_CHECKING:
    from benchmarks.gpu.run import Run
    from packhorse.kernels.matmul import MatmulConfig

__all__ = ["Failure", "Product", "compile_ahead", "gpu_answers", "likely_products", "spread"]

_Job = TypeVar("_Job")
_MAX_WORKERS = 14  # each takes half a GiB of the GPU's memory
_ROWS = 256  # of a product that is run to be compiled; a multiple of 16, like those of models
_SPREAD = 0.15  # of measured times around the model's, which decides where a search may go
_N_SEARCHES = 4
_PATIENCE = 45.0  # seconds that starting and compiling take at most


# Work in parallel.


class Failure(NamedTuple):
    """An exception in a process, in words, because not every exception can be pickled.

    Attributes:
        error: the name of its type, and its message.
        trace: where it was raised.
    """

    error: str
    trace: str


class _NotRun(NamedTuple):
    """The job came to a process that had lost the GPU before, by a fault in a kernel."""


_lost = [False]  # whether this process has lost the GPU
_PAUSE = 2.0  # seconds that it leaves to other processes, which can do the jobs


def spread(
    run: "Run", function: Callable[[_Job], Any], jobs: Sequence[_Job], patience: float = 120.0
) -> Iterator[tuple[_Job, Any]]:
    """Yield results as they come, until the part has to end; a failure is a result, too. After a
    fault a process cannot use the GPU: the jobs that it gets then go to new processes.

    Args:
        run: a smoke run stays in this process.
        function: defined in a module, because other processes import it.
        jobs: the argument of each call.
        patience: seconds without a result after which waiting ends, because the job of a process
            that a fault has ended never gives one.
    """
    if run.smoke:
        for job in jobs:
            yield _outcome((function, job))
        return
    while jobs:
        again = []
        for job, found in _spread_once(run, function, jobs, patience):
            if isinstance(found, _NotRun):
                again.append(job)
            else:
                yield job, found
        jobs = again


def _spread_once(
    run: "Run", function: Callable[[_Job], Any], jobs: Sequence[_Job], patience: float
) -> Iterator[tuple[_Job, Any]]:
    n_workers = min(_MAX_WORKERS, len(jobs), max((os.cpu_count() or 2) - 1, 1))
    # Not forked, because a child could not use the GPU. Leaving the block ends processes that are
    # late or hang.
    with multiprocessing.get_context("spawn").Pool(n_workers) as pool:
        results = pool.imap_unordered(_outcome, [(function, job) for job in jobs])
        for _ in jobs:
            try:
                left = max(run.ends - time.monotonic(), 0.1)
                yield results.next(min(left, patience))
            except multiprocessing.TimeoutError:
                return


def gpu_answers() -> bool:
    """Whether this process can still use the GPU; after a fault in a kernel it cannot."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _outcome(call: tuple[Callable[[Any], Any], Any]) -> tuple[Any, Any]:
    function, job = call
    if _lost[0]:
        time.sleep(_PAUSE)
        return job, _NotRun()
    try:
        return job, function(job)
    except Exception as error:
        failure = Failure(f"{type(error).__name__}: {error}", traceback.format_exc())
        _lost[0] = torch.cuda.is_available() and not gpu_answers()
        return job, failure


# Compiling before measuring.


@dataclass(frozen=True)
class Product:
    """A product that will be run.

    Attributes:
        choice: how.
        format: name of the weight's format.
        n_columns: its columns.
        n_tokens: vectors that it is multiplied with.
        on_host: whether in Triton's interpreter.
    """

    choice: Choice
    format: str
    n_columns: int
    n_tokens: int
    on_host: bool = False

    @property
    def code(self) -> tuple[object, ...]:
        """Everything that its machine code depends on, if its numbers of rows and columns are
        multiples of 16, as in models."""
        steps, config = WEIGHT_FORMATS[self.format].n_steps(self.n_columns), self.choice.config
        if config is None:
            return self.format, self.choice, steps >= 512 or steps
        if isinstance(config, StreamConfig):
            return stream_options(config, WEIGHT_FORMATS[self.format])
        n_parts = config.n_parts
        return self.format, self.choice, steps % (config.block_steps * n_parts) == 0


def compile_ahead(run: "Run", products: Iterable[Product]) -> int:
    """Compile the kernels of products, each once; returns how many there are."""
    own = list({product.code: product for product in products}.values())
    if run.smoke:
        own = [replace(product, on_host=True) for product in own[:1]]
    start = time.monotonic()
    found = [result for _, result in spread(run, run_once, own, _PATIENCE)]
    failures = [result.error for result in found if isinstance(result, Failure)]
    for error in failures[:3]:  # the measurement will raise the same error
        print(f"(not compiled: {error[:200]})")
    n_compiled, seconds = len(found) - len(failures), time.monotonic() - start
    print(f"({n_compiled} of {len(own)} kernels compiled in {seconds:.0f} s)", flush=True)
    return n_compiled


def run_once(product: Product) -> None:
    """Run a product with a few rows."""
    device, format = (
        torch.device("cpu" if product.on_host else "cuda"),
        WEIGHT_FORMATS[product.format],
    )
    x = torch.ones(product.n_tokens, product.n_columns, dtype=torch.bfloat16, device=device)
    weights = _few_rows(format, product.n_columns, device)
    run_choice(product.choice, x, weights, format, product.n_columns)


@cache
def _few_rows(format: WeightFormat, n_columns: int, device: torch.device) -> WeightTensors:
    return pack_on(random_weight(_ROWS, n_columns, device), format, threads=1)


def likely_products(
    shape: Shape,
    format: WeightFormat,
    model: DeviceModel,
    buckets: Sequence[int],
    order: "MatmulConfig | None",
    streams: bool,
) -> Iterator[Product]:
    """Products that a search may measure, found by searches with times around the predicted; with
    the arguments of `tune`."""
    predict = predictor(shape.n_rows, shape.n_columns, format, model)
    for seed in range(_N_SEARCHES):
        taken: set[tuple[Choice, int]] = set()

        def measure(choice: Choice, n_tokens: int, seed: int = seed) -> float:
            noise = random.Random(f"{seed} {choice} {n_tokens}").gauss(0, _SPREAD)
            return predict(choice, n_tokens) * math.exp(noise)

        def note(choice: Choice, n_tokens: int, _: float, taken: Any = taken) -> None:
            taken.add((choice, n_tokens))

        size = shape.n_rows, shape.n_columns
        search = Search(on_measured=note)
        tune(
            *size, format, model, measure,
            buckets=buckets, order=order, search=search, streams=streams,
        )  # fmt: skip
        for choice, n_tokens in taken:
            yield Product(choice, format.name, shape.n_columns, n_tokens)
