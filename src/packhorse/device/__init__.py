"""Tensors that are packed while they lie in the memory of a GPU, or on their way to it."""

__all__: list[str] = []
