"""Local and remote file systems, output that is complete or absent, and strict JSON."""

__all__: list[str] = []
