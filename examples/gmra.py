"""Describe a curved surface in 100 dimensions by planes, from coarse to fine.

Run `python examples/gmra.py`. It prints the error at each scale, and what the shortest code of the
points takes. The points come in batches, as from a file that is larger than memory.
"""

import argparse
from collections.abc import Iterator

import numpy as np

from packhorse.learn import GMRA


def swiss_roll(n_points: int, batch: int = 1000) -> Iterator[np.ndarray]:
    """Batches of points on a rolled-up sheet, which is turned at random in 100 dimensions."""
    rng = np.random.default_rng(0)
    turn = np.linalg.qr(rng.standard_normal((100, 3)))[0]
    for _ in range(0, n_points, batch):
        angle, height = rng.uniform(5, 14, batch), rng.uniform(0, 21, batch)
        roll = np.column_stack([angle * np.cos(angle), height, angle * np.sin(angle)])
        yield (roll @ turn.T).astype(np.float32)


def main(args: argparse.Namespace) -> None:
    """Fit, and show what each scale gives."""
    gmra = GMRA(n_components=2, leaf_size=64, random_state=0, memory_nbytes=args.memory << 20)
    gmra.fit(swiss_roll(args.points))
    print(f"{len(gmra.nodes_)} cells at {gmra.n_scales_} scales")

    points = next(swiss_roll(args.points))
    codes = gmra.transform(points)
    for scale in range(gmra.n_scales_):
        found = gmra.inverse_transform(codes, scale)
        error = np.sqrt(((found - points) ** 2).sum(axis=1).mean())
        n_coefficients = codes[:, gmra.column_scales_ <= scale].nnz / len(points)
        print(f"scale {scale:2}: {n_coefficients:5.1f} coefficients a point, error {error:.4f}")

    short = gmra.encode(points)
    error = np.sqrt(((gmra.decode(short) - points) ** 2).sum(axis=1).mean())
    print(f"{short.coefficients.shape[1]} coefficients and a cell a point: error {error:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=20_000, help="how many")
    parser.add_argument("--memory", type=int, default=4, help="MiB to use for points")
    main(parser.parse_args())
