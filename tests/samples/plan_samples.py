"""Plans of frames for kernels, and data of layers, for their tests."""

import ml_dtypes
import numpy as np

from packhorse.frame.header import FrameHeader, open_frame
from packhorse.frame.header import header_of as fields_of
from packhorse.gpu.plans import ChunkPlan, plan_chunks


def header_of(data: bytes) -> FrameHeader:
    return fields_of(open_frame(np.frombuffer(data, np.uint8), None, 0, None))


def plan_of(data: bytes) -> tuple[np.ndarray, ChunkPlan]:
    header = header_of(data)
    payload = np.frombuffer(data, np.uint8)[header.header_nbytes :]
    return payload, plan_chunks(payload, header.table, header.geometry, header.header_nbytes)


def floats(n: int, dtype: str, seed: int = 0) -> bytes:
    """Numbers like a layer's weights, with a few outliers of all kinds."""
    rng = np.random.default_rng(seed)
    values = 0.02 * rng.standard_normal(n)
    values[rng.random(n) < 0.02] = rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3e4])
    kinds = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64}
    with np.errstate(over="ignore"):
        return values.astype(kinds[dtype]).tobytes()
