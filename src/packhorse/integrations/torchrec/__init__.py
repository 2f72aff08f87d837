"""Packhorse for torchrec; users import `packhorse.torchrec` (docs/dlrm.md)."""

__all__: list[str] = []
