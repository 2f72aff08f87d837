"""Reports on tensors: what is compressible, why, and what follows."""
