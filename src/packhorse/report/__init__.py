"""Reports on tensors: what is compressible, why, and what follows."""

__all__: list[str] = []
