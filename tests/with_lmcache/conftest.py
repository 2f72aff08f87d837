"""Tests in the real LMCache, which needs packages of other versions (`make test-lmcache`)."""

from importlib.util import find_spec

if find_spec("lmcache") is None:  # `make test` collects this folder, too
    collect_ignore_glob = ["test_*.py"]
