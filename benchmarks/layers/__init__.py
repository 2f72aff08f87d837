"""Weights that stay packed, on the CPU: their codec, and layers that multiply with them."""
