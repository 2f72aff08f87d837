"""Run a few products, for tools that watch a program: `python benchmarks/gpu.py products`.

    python benchmarks/gpu.py products 4096x14336x8 --way fused --way decode

runs each product (rows x columns x tokens) in each way, and compares it with FP64. It times
nothing. Parts `sanitize` and `profile` of `gpu.py device` run it under compute-sanitizer and ncu.
"""

import argparse
import os
import re
import sys

__all__ = ["WAYS", "main"]

WAYS = ("chosen", "fused", "stream", "decode")


def main(argv: list[str]) -> int:
    """Run the products.

    Args:
        argv: the arguments after `products`.

    Returns:
        The exit status: 0, 1 if a product is wrong, 3 without a GPU.
    """
    parser = argparse.ArgumentParser(
        prog="gpu.py products", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("sizes", nargs="+", metavar="ROWSxCOLUMNSxTOKENS", type=_size)
    parser.add_argument("--way", action="append", choices=WAYS, help="several may be given")
    parser.add_argument("--smoke", action="store_true", help="in Triton's interpreter, on the CPU")
    args = parser.parse_args(argv)
    if args.smoke:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if not args.smoke and not torch.cuda.is_available():
        print(
            "no CUDA GPU is here: run this on a machine with one. --smoke runs products in "
            "Triton's interpreter, which is slow, so give it small ones, such as 40x96x3",
            file=sys.stderr,
        )
        return 3
    wrong = 0
    for size in args.sizes:
        for way in args.way or ["chosen"]:
            device = torch.device("cpu") if args.smoke else torch.device("cuda", 0)
            found = _multiply(*size, way, device)
            print("x".join(map(str, size)), way, found, flush=True)
            wrong += found == "WRONG"
    return 1 if wrong else 0


def _size(text: str) -> tuple[int, int, int]:
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no product; give one such as 4096x14336x8")
    rows, columns, tokens = map(int, found.groups())
    return rows, columns, tokens


def _multiply(n_rows: int, n_columns: int, n_tokens: int, way: str, device: object) -> str:
    """Run a product, and compare it with FP64: right, WRONG, or not here."""
    import torch

    from packhorse.device.choices import choose
    from packhorse.device.matrix_tuning import pack_on, random_weight
    from packhorse.device.product_check import ExactProduct
    from packhorse.device.products import run_choice
    from packhorse.device.strategy import Choice, Strategy
    from packhorse.device.stream import is_ready
    from packhorse.layout import W12

    assert isinstance(device, torch.device)
    if way == "stream" and not is_ready(device):
        return "does not run here"
    weight = random_weight(n_rows, n_columns, device)
    choice = choose(n_rows, n_columns, n_tokens, W12, device)
    if way != "chosen":
        choice = Choice(Strategy(way))
    x = torch.randn(n_tokens, n_columns, device=device).bfloat16()
    y = run_choice(choice, x, pack_on(weight, W12), W12, n_columns)
    return "right" if ExactProduct(x, weight).allows(y, choice) else "WRONG"
