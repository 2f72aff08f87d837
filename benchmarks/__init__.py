"""Measurements of Packhorse: commands in this folder, and their parts in subfolders.

A command is run as `python benchmarks/NAME.py`, from any folder, and needs no installation of its
own. Imports use full names, such as `benchmarks.codecs.peers`. `common/` and `data/` import
nothing but themselves; `codecs/` may import those two, and `snapshots/`, `layers/` and `gpu/` may
import all three, but not each other. No folder imports a command.
"""
