"""Packhorse plugged into other frameworks: one module or folder for each."""

__all__: list[str] = []
