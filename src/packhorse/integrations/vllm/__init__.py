"""Packhorse for vLLM: `vllm serve MODEL --quantization packhorse` (docs/serving.md)."""

__all__: list[str] = []
