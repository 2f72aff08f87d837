"""Packhorse in other people's frameworks, one module or folder for each."""

__all__: list[str] = []
