"""Packhorse for LMCache: keys and values on their way to storage, packed without loss
(docs/host.md)."""

from packhorse.integrations.lmcache import PackhorseDeserializer, PackhorseSerializer, register

__all__ = ["PackhorseDeserializer", "PackhorseSerializer", "register"]
