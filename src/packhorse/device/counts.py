"""What the model of time knows of compiled kernels: instructions and registers.

Written by `python benchmarks/gpu.py counting`, with Triton 3.6.0, for sm_90 and four warps
(blocks of 64 tokens: for sm_80); do not edit by hand. The hash of what was compiled is
d94f9265250e2c5c. Divisions that spill registers in the loop are left out, and those that spill
more than 64 outside, which happens once in each program. The model knows only the divisions of
this table, so no others are ever chosen or measured.
"""

from typing import NamedTuple

__all__ = ["INSTRUCTIONS", "Counted"]


class Counted(NamedTuple):
    """What was counted of a division.

    Attributes:
        per_weight: instructions in the main loop for each weight, over all threads.
        alone: instructions that a scheduler issues in a cycle in the loop, if it has one warp and
            memory never makes it wait; simulated from the control codes.
        outside: instructions of a warp before and after the loop, with one turn of exceptions.
        registers: of a thread.
    """

    per_weight: float
    alone: float
    outside: int
    registers: int


# (format, rows of a tile, tokens of a block, steps of a warp, tiles)
INSTRUCTIONS: dict[tuple[str, int, int, int, int], Counted] = {
    ("W12", 16, 8, 32, 1): Counted(3.5, 0.47, 728, 72),
    ("W12", 16, 8, 64, 1): Counted(3.14, 0.47, 823, 72),
    ("W12", 16, 8, 128, 1): Counted(2.84, 0.43, 989, 128),
    ("W12", 16, 16, 32, 1): Counted(4.22, 0.45, 865, 80),
    ("W12", 16, 16, 64, 1): Counted(4.14, 0.46, 967, 106),
    ("W12", 16, 16, 128, 1): Counted(3.74, 0.52, 1249, 192),
    ("W12", 16, 32, 32, 1): Counted(5.94, 0.51, 1122, 127),
    ("W12", 16, 32, 64, 1): Counted(6.17, 0.46, 1365, 152),
    ("W12", 16, 8, 64, 2): Counted(2.38, 0.55, 1056, 126),
    ("W12", 16, 8, 128, 2): Counted(2.26, 0.42, 1365, 182),
    ("W12", 16, 8, 64, 3): Counted(2.19, 0.49, 1364, 166),
    ("W12", 16, 8, 128, 3): Counted(2.13, 0.49, 1518, 255),
    ("W12", 32, 8, 32, 1): Counted(2.62, 0.4, 920, 80),
    ("W12", 32, 8, 64, 1): Counted(2.39, 0.58, 1078, 121),
    ("W12", 32, 8, 128, 1): Counted(2.3, 0.45, 1394, 168),
    ("W12", 32, 16, 32, 1): Counted(3.02, 0.52, 1103, 127),
    ("W12", 32, 16, 64, 1): Counted(2.99, 0.47, 1305, 136),
    ("W12", 32, 16, 128, 1): Counted(2.91, 0.42, 1480, 255),
    ("W12", 32, 32, 32, 1): Counted(4.28, 0.48, 1550, 138),
    ("W12", 32, 32, 64, 1): Counted(4.1, 0.48, 1795, 255),
    ("W12", 64, 8, 32, 1): Counted(2.17, 0.45, 1306, 128),
    ("W12", 64, 8, 64, 1): Counted(2.09, 0.45, 1560, 168),
    ("W12", 64, 16, 32, 1): Counted(2.49, 0.54, 1633, 180),
    ("W12", 64, 16, 64, 1): Counted(2.45, 0.54, 1949, 255),
    ("W12", 64, 32, 32, 1): Counted(3.19, 0.51, 2288, 255),
    ("W12", 128, 8, 32, 1): Counted(1.96, 0.56, 2610, 254),
    ("W12", 128, 16, 32, 1): Counted(2.22, 0.4, 3232, 255),
    ("W12", 32, 8, 32, 2): Counted(2.2, 0.51, 1311, 127),
    ("W12", 32, 8, 64, 2): Counted(2.1, 0.48, 1582, 168),
    ("W12", 32, 8, 128, 2): Counted(2.05, 0.44, 1815, 255),
    ("W12", 32, 16, 32, 2): Counted(2.54, 0.48, 1587, 168),
    ("W12", 32, 16, 64, 2): Counted(2.42, 0.63, 1900, 240),
    ("W12", 32, 32, 32, 2): Counted(3.23, 0.54, 2219, 255),
    ("W12", 32, 8, 32, 3): Counted(2.06, 0.53, 1749, 168),
    ("W12", 32, 8, 64, 3): Counted(2.01, 0.51, 1886, 255),
    ("W12", 32, 16, 32, 3): Counted(2.33, 0.52, 2144, 255),
    ("W12", 32, 32, 32, 3): Counted(2.88, 0.41, 3000, 255),
    ("W12", 32, 8, 32, 4): Counted(1.98, 0.57, 2100, 252),
    ("W12", 32, 8, 64, 4): Counted(1.96, 0.52, 2327, 255),
    ("W12", 64, 8, 32, 2): Counted(1.97, 0.58, 2064, 252),
    ("W12", 64, 8, 64, 2): Counted(1.95, 0.49, 2260, 255),
    ("W12", 64, 16, 32, 2): Counted(2.22, 0.41, 2616, 255),
    ("W12", 64, 64, 32, 1): Counted(7.59, 0.43, 1269, 144),
    ("W12", 64, 64, 64, 1): Counted(7.2, 0.52, 1411, 168),
    ("W12", 128, 64, 32, 1): Counted(5.05, 0.43, 1933, 168),
    ("W11", 16, 8, 32, 1): Counted(2.9, 0.37, 1061, 80),
    ("W11", 16, 8, 64, 1): Counted(2.65, 0.5, 1025, 161),
    ("W11", 16, 16, 32, 1): Counted(3.88, 0.45, 1183, 127),
    ("W11", 16, 16, 64, 1): Counted(3.61, 0.46, 1253, 255),
    ("W11", 16, 32, 32, 1): Counted(5.62, 0.35, 1385, 178),
    ("W11", 32, 8, 32, 1): Counted(2.39, 0.44, 1411, 127),
    ("W11", 32, 8, 64, 1): Counted(2.36, 0.63, 1327, 255),
    ("W11", 32, 16, 32, 1): Counted(2.9, 0.37, 1410, 168),
    ("W11", 32, 32, 32, 1): Counted(4.37, 0.42, 1874, 255),
}
