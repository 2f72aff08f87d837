"""Instructions for each weight in the main loop of fused products, counted in machine code.

By `benchmarks/gpu_model.py --counts`, which compiles the kernel for sm_90 with four warps and three
stages, and prints this table (this one: Triton 3.6). What spills more than a few registers is left
out. The model of time knows nothing else, so only divisions that are here are ever chosen or
measured.
"""

__all__ = ["INSTRUCTIONS", "MANY_INSTRUCTIONS"]

# (format, rows of a block, tokens of a block, steps of a warp): instructions for a weight
INSTRUCTIONS: dict[tuple[str, int, int, int], float] = {
    ("W12", 16, 8, 16): 5.06,
    ("W12", 16, 8, 32): 3.44,
    ("W12", 16, 8, 64): 2.94,
    ("W12", 16, 8, 128): 2.83,
    ("W12", 16, 16, 16): 5.69,
    ("W12", 16, 16, 32): 4.66,
    ("W12", 16, 16, 64): 4.06,
    ("W12", 16, 16, 128): 3.71,
    ("W12", 16, 32, 16): 7.62,
    ("W12", 16, 32, 32): 5.94,
    ("W12", 16, 32, 64): 5.83,
    ("W12", 32, 8, 32): 2.64,
    ("W12", 32, 8, 64): 2.46,
    ("W12", 32, 8, 128): 2.3,
    ("W12", 32, 16, 32): 3.17,
    ("W12", 32, 16, 64): 2.95,
    ("W12", 32, 32, 32): 4.3,
    ("W12", 32, 32, 64): 4.11,
    ("W12", 64, 8, 32): 2.19,
    ("W12", 64, 8, 64): 2.08,
    ("W12", 64, 16, 32): 2.48,
    ("W12", 64, 16, 64): 2.44,
    ("W12", 64, 32, 32): 3.19,
    ("W12", 128, 8, 32): 1.96,
    ("W12", 128, 16, 32): 2.2,
    ("W11", 16, 8, 16): 3.67,
    ("W11", 16, 8, 32): 2.89,
    ("W11", 16, 8, 64): 2.66,
    ("W11", 16, 16, 16): 3.75,
    ("W11", 16, 16, 32): 3.8,
    ("W11", 16, 32, 16): 5.39,
    ("W11", 16, 32, 32): 5.49,
    ("W11", 32, 8, 32): 2.43,
    ("W11", 32, 8, 64): 2.33,
    ("W11", 32, 16, 32): 2.88,
    ("W11", 32, 32, 32): 4.34,
    ("W11", 64, 8, 32): 2.26,
    ("W11", 64, 16, 32): 2.79,
}

# The kernel for many tokens: (rows of a block, its tokens, its steps, warps)
MANY_INSTRUCTIONS: dict[tuple[int, int, int, int], float] = {
    (64, 32, 32, 4): 4.41,
    (64, 32, 64, 4): 3.69,
    (64, 64, 32, 4): 5.19,
    (64, 64, 64, 4): 4.55,
    (64, 128, 32, 4): 7.0,
    (64, 128, 64, 4): 6.38,
    (128, 32, 32, 4): 3.27,
    (128, 32, 32, 8): 4.16,
    (128, 32, 64, 4): 2.92,
    (128, 32, 64, 8): 3.27,
    (128, 64, 32, 4): 3.66,
    (128, 64, 32, 8): 4.31,
    (128, 64, 64, 4): 3.32,
    (128, 64, 64, 8): 3.67,
    (128, 128, 32, 8): 5.31,
    (128, 128, 64, 8): 4.55,
    (256, 32, 32, 4): 2.7,
    (256, 32, 32, 8): 3.17,
    (256, 32, 64, 4): 2.52,
    (256, 32, 64, 8): 2.7,
    (256, 64, 32, 8): 3.27,
    (256, 64, 64, 8): 2.92,
}
