"""Packhorse for HDF5: `create_dataset(..., compression=Packhorse())` of h5py (docs/arrays.md)."""

from packhorse.integrations.hdf5 import FILTER_ID, Packhorse

__all__ = ["FILTER_ID", "Packhorse"]
