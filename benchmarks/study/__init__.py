"""How compressible the states of training runs are: the code of the command `study.py`."""
