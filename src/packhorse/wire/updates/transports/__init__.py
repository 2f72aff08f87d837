"""How updates get from the sender to the receivers: files, sockets, process groups."""

__all__: list[str] = []
