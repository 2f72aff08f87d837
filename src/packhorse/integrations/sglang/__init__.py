"""Packhorse for SGLang: `--quantization packhorse` (docs/serving.md)."""

__all__: list[str] = []
