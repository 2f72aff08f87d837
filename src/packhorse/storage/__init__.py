"""Where bytes lie: file systems near and far, output that is whole or absent, careful JSON."""

__all__: list[str] = []
