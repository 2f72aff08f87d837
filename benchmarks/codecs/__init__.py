"""Codecs of single tensors: ours, the rivals, the timing of both, and the tables of the figures."""
