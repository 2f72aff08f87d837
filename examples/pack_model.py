"""Pack a safetensors file, read parts of the packed file, and restore the original.

Run `python examples/pack_model.py MODEL.safetensors`. `make demo` also measures the speed.
"""

import sys
from filecmp import cmp
from pathlib import Path
from tempfile import TemporaryDirectory

import packhorse
from packhorse.disk import pack_file, unpack_file, verify_file


def main(model: Path) -> None:
    """Pack and unpack `model`."""
    with TemporaryDirectory() as folder:
        packed, back = Path(folder) / "model.ph.safetensors", Path(folder) / "back.safetensors"

        result = pack_file(model, packed)
        print(f"{result.original_nbytes:,} -> {result.packed_nbytes:,} bytes: {result.ratio:.4f}")
        for problem in verify_file(packed):
            sys.exit(problem.message)

        # A packed file opens like any safetensors file. A slice decodes only the chunks it needs.
        with packhorse.open_file(packed, framework="np") as tensors:
            name = max(tensors.keys(), key=lambda key: tensors.frame(key).logical_nbytes)
            rows = tensors.get_slice(name)[:2]
            print(f"{name}: {tensors.frame(name).shape}, first rows {rows.shape} of {rows.dtype}")

        unpack_file(packed, back)
        print("bit-exact:", "yes" if cmp(model, back, shallow=False) else "NO")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: pack_model.py MODEL.safetensors")
    main(Path(sys.argv[1]))
