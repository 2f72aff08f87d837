"""Checkpoints of one training run: as pairs for codecs, and as histories for stores."""
