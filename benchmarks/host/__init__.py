"""Measurements of tables in host memory: `python benchmarks/run.py host`."""
