"""Files of many small tensors: a file descriptor for each would be too many."""

import subprocess
import sys
from pathlib import Path

CHILD = Path(__file__).parents[1] / "samples" / "many_child.py"


def test_many_small_tensors_take_few_open_files(tmp_path):
    done = subprocess.run([sys.executable, CHILD, tmp_path], capture_output=True, text=True)
    assert not done.stderr
    assert done.returncode == 0
