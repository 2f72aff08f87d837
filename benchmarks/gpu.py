"""Packed weights on GPUs: `python benchmarks/gpu.py` with a form.

- `device` measures on the GPU of this machine: see gpu/device.py.
- `collectives` measures packed collectives on the GPUs of this machine: see gpu/collectives.py.
- `host` measures gathers of packed tables from memory of the host: see gpu/host.py.
- `layers` measures layers whose weights lie in host memory: see gpu/host_layers.py.
- `wheels` downloads what a GPU machine without a network lacks: see gpu/wheels.py.
- `products` runs a few products, for tools that watch a program: see gpu/products.py.
- `predict` prints what the model of time predicts for an H200, and writes docs/benchmarks_gpu.md:
  see gpu/predictions.py.
- `simulate` simulates products from their machine code: see gpu/simulations.py.
- `counting` counts instructions and registers for the model of time: see gpu/counting.py.
- `sass` counts the instructions of the kernels, without a GPU: see gpu/sass.py.
- `tables` counts those of the kernels that gather packed rows: see gpu/table_code.py.
- `hazards` looks for registers that are overwritten too early, without a GPU: see gpu/hazards.py.

`python benchmarks/gpu.py device --help` lists the options of a form.
"""

import argparse
import sys
from importlib import import_module
from pathlib import Path

# Run as a file, a command finds the package `benchmarks` only in the folder that holds it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

FORMS = {
    "device": "benchmarks.gpu.device",
    "collectives": "benchmarks.gpu.collectives",
    "host": "benchmarks.gpu.host",
    "layers": "benchmarks.gpu.host_layers",
    "wheels": "benchmarks.gpu.wheels",
    "products": "benchmarks.gpu.products",
    "predict": "benchmarks.gpu.predictions",
    "simulate": "benchmarks.gpu.simulations",
    "counting": "benchmarks.gpu.counting",
    "sass": "benchmarks.gpu.sass",
    "tables": "benchmarks.gpu.table_code",
    "hazards": "benchmarks.gpu.hazards",
}


def main(argv: list[str]) -> int:
    """Run the form that the command line names.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The exit status of the form.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("form", choices=FORMS)
    form = parser.parse_args(argv[:1]).form
    # Imported late: worker processes load this file too, and the forms load PyTorch and Triton.
    status: int = import_module(FORMS[form]).main(argv[1:])
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
