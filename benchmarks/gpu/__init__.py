"""Packed weights on GPUs: the measurements, predictions and instruction counts of `gpu.py`."""
