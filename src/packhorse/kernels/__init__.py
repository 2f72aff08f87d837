"""Kernels for GPUs, in Triton. They take tensors and numbers, and return tensors.

Each module has kernels and one launcher for each. Kernels check nothing; their launchers check
arguments, allocate memory and choose the grid. Where inline assembly makes a kernel faster, a
second version in plain Triton computes the same bits, for Triton's interpreter and for GPUs of
other makers. Without a GPU, TRITON_INTERPRET=1 in the environment, set before Triton is imported,
runs all kernels on the CPU, slowly.
"""

__all__: list[str] = []
