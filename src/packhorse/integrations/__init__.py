"""Connects Packhorse to other frameworks; each framework has a module or a folder."""

__all__: list[str] = []
