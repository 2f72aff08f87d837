"""Ranks on links of a known speed: collectives and weight updates, ours and the rivals'."""
