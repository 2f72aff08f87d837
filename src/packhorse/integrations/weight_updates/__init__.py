"""Weight updates in frameworks of reinforcement learning and in servers of models
(docs/updates.md): a module for each. None of them imports its framework before it is used."""

__all__: list[str] = []
