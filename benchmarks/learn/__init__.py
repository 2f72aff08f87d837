"""Experiments with `packhorse.learn`."""
