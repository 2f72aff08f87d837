"""Standardize an array larger than the memory it may take, in a shelf that survives kill -9.

Run `python examples/shelf.py FOLDER`, stop it at any moment, and run it again: it goes on where the
last commit left it. Each commit has some rows together with the sums over all rows so far.
"""

import argparse
import os
import signal

import numpy as np

from packhorse.disk import Shelf


def measure(first_row: int, n_rows: int) -> np.ndarray:
    """The rows of an instrument; each row depends on its number alone."""
    rows = np.arange(first_row, first_row + n_rows)[:, None]
    noise = np.stack([np.random.default_rng(int(row)).standard_normal(512) for row in rows[:, 0]])
    return (np.sin(rows / 50 + np.arange(512) / 100) + 0.01 * noise).astype(np.float32)


def main(args: argparse.Namespace) -> None:
    """Collect the rows that are missing, standardize a copy, and print what that took."""
    with Shelf(args.shelf, cache_nbytes=16 << 20) as shelf:
        if "raw" not in shelf:
            with shelf.transaction():
                shelf.create("raw", (0, 512), "float32")
                shelf["sum"] = np.zeros((2, 512))  # of the values, and of their squares
        raw, total = shelf["raw"], shelf["sum"]
        print(f"{len(raw)} of {args.rows} rows are there", flush=True)
        while len(raw) < args.rows:
            rows = measure(len(raw), min(args.batch, args.rows - len(raw)))
            with shelf.transaction():  # the rows and their sums: both, or none of them
                raw.append(rows)
                total += np.stack([rows.sum(0, np.float64), (rows.astype(np.float64) ** 2).sum(0)])
            if args.kill_at and len(raw) >= args.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        mean, square = total[:] / len(raw)
        scale = np.sqrt(square - mean**2)
        with shelf.transaction():
            clean = shelf.create("clean", (0, 512), "bfloat16", replace=True)
            for rows in raw.iter_chunks():
                clean.append(((rows - mean) / scale).astype(clean.dtype))
        for name in ("raw", "clean"):
            tensor = shelf[name]
            print(f"{name}: {tensor.nbytes:,} bytes, packed {tensor.ratio:.2f} times smaller")
        print(f"mean of column 0: {np.asarray(clean[:, 0], np.float64).mean():+.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shelf", help="folder of the shelf")
    parser.add_argument("--rows", type=int, default=20_000, help="rows to collect")
    parser.add_argument("--batch", type=int, default=500, help="rows of a commit")
    parser.add_argument("--kill-at", type=int, help="rows after which the process kills itself")
    main(parser.parse_args())
