"""What hops share on GPUs: frames that are decoded there, models of devices and of their links, the
timing of kernels, and a search for the fastest way with a cache of what was found.

Each module is imported by its own name. `models` and `search` need nothing but Python, `cache` no
PyTorch either; all others ask for PyTorch and Triton.
"""

__all__: list[str] = []
