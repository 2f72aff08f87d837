"""GPU code that the hops share: decoding of frames, models of devices and their links, timing of
kernels, and a search for the fastest choice with a cache of its results.

Each module is imported by its own name. `models`, `search` and `figure_cache` need neither PyTorch
nor Triton; `plans` needs the core; all others need PyTorch and Triton.
"""

__all__: list[str] = []
