"""Peak memory of loading models whose weights stay packed: a part of `run.py layers`.

Each way of loading runs in a separate process, which samples its own memory every millisecond.
Pages that are resident and not shared have no file behind them. Mapped pages of files, which the
system can drop at any time, are counted separately. The figures are the growth since just before
loading.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["LOADERS", "Sizes", "measure", "require_transformers", "versions"]

ROOT = Path(__file__).resolve().parents[2]
PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")
SECONDS_BETWEEN = 0.001


class Sizes(NamedTuple):
    """Sizes of the files and models that are loaded.

    Attributes:
        n_matrices: in a packed file.
        side: rows and columns of each.
        hidden: width of a Llama.
        intermediate: width of its feed-forward layers.
        n_layers: how many layers it has.
        vocabulary: rows of its embedding and of its output layer.
    """

    n_matrices: int
    side: int
    hidden: int
    intermediate: int
    n_layers: int
    vocabulary: int


def require_transformers() -> Any:
    """Import the package.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError("transformers is not installed") from error
    return transformers


def versions() -> dict[str, str]:
    """The versions of the packages that only these measurements need."""
    found = {}
    for name in ("transformers", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def measure(sizes: Sizes, ways: Iterable[str]) -> list[dict[str, Any]]:
    """Measure the peak memory of each way of loading.

    Args:
        sizes: sizes of the files and models.
        ways: keys of `LOADERS`; ways that load models are left out if transformers is not
            installed.

    Returns:
        A row for each: its name, bytes of the plain weights, and the peak of memory while it loads.
    """
    has_transformers = importlib.util.find_spec("transformers") is not None
    possible = [way for way in ways if way in FILE_LOADERS or has_transformers]
    with tempfile.TemporaryDirectory() as folder:
        _make_file(Path(folder), sizes)
        if set(possible) - set(FILE_LOADERS):
            _make_model(Path(folder), sizes)
        return [json.loads(_in_process(way, folder)) for way in possible]


def _in_process(way: str, folder: str) -> str:
    command = [sys.executable, "-m", "benchmarks.layers.loading", way, folder]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    return done.stdout.strip().rpartition("\n")[2]


class Usage(NamedTuple):
    """Bytes of memory that this process has.

    Attributes:
        anonymous: with no file behind it.
        resident: all, mapped pages of files too.
    """

    anonymous: int
    resident: int

    @classmethod
    def now(cls) -> "Usage":
        """The memory that this process has now."""
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
        return cls((resident - shared) * PAGE_NBYTES, resident * PAGE_NBYTES)


class Watch:
    """Records the most memory that this process has while the block runs."""

    def __init__(self) -> None:
        self.peak = Usage(0, 0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._ended.wait(SECONDS_BETWEEN):
            self._look()

    def _look(self) -> None:
        self.peak = Usage(*map(max, self.peak, Usage.now()))

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()


# Files and models to load.


def _make_file(folder: Path, sizes: Sizes) -> None:
    import torch
    from safetensors.torch import save_file

    from packhorse.disk import pack_file

    torch.manual_seed(0)
    shape = sizes.side, sizes.side
    tensors = {f"{i}.weight": _normal(shape) for i in range(sizes.n_matrices)}
    save_file(tensors, folder / "plain.safetensors")
    pack_file(folder / "plain.safetensors", folder / "packed.ph.safetensors")


def _normal(shape: tuple[int, int]) -> Any:
    import torch

    return (0.02 * torch.randn(shape)).bfloat16()


def _make_model(folder: Path, sizes: Sizes) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from packhorse.disk import pack_folder

    config = LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.n_layers,
        vocab_size=sizes.vocabulary,
        num_attention_heads=max(sizes.hidden // 64, 1),
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "F32")
    model.to(torch.bfloat16).save_pretrained(folder / "BF16")
    pack_folder(folder / "BF16", folder / "packed")
    _load_packed(folder / "BF16").save_pretrained(folder / "W12")


# Ways of loading.


def _read_plain(folder: Path) -> Any:
    from packhorse.torch import load_file

    return load_file(folder / "packed.ph.safetensors")


def _read_packed(folder: Path) -> Any:
    import packhorse
    from packhorse.device import pack_weight

    with packhorse.open_file(folder / "packed.ph.safetensors", framework="pt") as file:
        return {name: pack_weight(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118


def _load(folder: Path, **options: Any) -> Any:
    import torch
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)


def _load_packed(folder: Path) -> Any:
    from packhorse.transformers import PackhorseConfig

    return _load(folder, quantization_config=PackhorseConfig())


def _load_folder(folder: Path) -> Any:
    import torch

    from packhorse.transformers import PackhorseConfig, load_packed_model

    return load_packed_model(folder, dtype=torch.bfloat16, quantization_config=PackhorseConfig())


FILE_LOADERS: dict[str, Callable[[Path], Any]] = {
    "packed file to plain tensors": _read_plain,
    "packed file to packed weights": _read_packed,
}
LOADERS: dict[str, Callable[[Path], Any]] = FILE_LOADERS | {
    "from_pretrained, plain": lambda folder: _load(folder / "BF16"),
    "from_pretrained, packed from BF16 files": lambda folder: _load_packed(folder / "BF16"),
    "from_pretrained, packed from FP32 files": lambda folder: _load_packed(folder / "F32"),
    "from_pretrained, saved packed": lambda folder: _load(folder / "W12"),
    "load_packed_model, packed": lambda folder: _load_folder(folder / "packed"),
}


def _held_nbytes(loaded: Any) -> tuple[int, int]:
    """Bytes of all tensors: decoded, and as they are in memory."""
    from packhorse.device import PackedWeight

    tensors = list(loaded.values() if isinstance(loaded, dict) else loaded.parameters())
    held = [t.packed_nbytes if isinstance(t, PackedWeight) else t.nbytes for t in tensors]
    return sum(tensor.nbytes for tensor in tensors), sum(held)


def _watch(way: str, folder: Path) -> dict[str, Any]:
    import packhorse.torch

    if way not in FILE_LOADERS:
        import packhorse.transformers

        packhorse.transformers.load_packed_model  # noqa: B018  (all is imported)
        from transformers import LlamaForCausalLM  # noqa: F401
    before = Usage.now()
    with Watch() as watch:
        loaded = LOADERS[way](folder)
    plain, held = _held_nbytes(loaded)
    return {
        "way": way,
        "plain_nbytes": plain,
        "held_nbytes": held,
        "peak_nbytes": watch.peak.anonymous - before.anonymous,
        "resident_nbytes": watch.peak.resident - before.resident,
    }


if __name__ == "__main__":
    print(json.dumps(_watch(sys.argv[1], Path(sys.argv[2]))))
