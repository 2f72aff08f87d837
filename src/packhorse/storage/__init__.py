"""Local and remote file systems, output that is complete or absent, and careful JSON."""

__all__: list[str] = []
