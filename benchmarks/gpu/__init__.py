"""Packed weights on GPUs: what `gpu.py` measures on one, predicts, and counts without one."""
