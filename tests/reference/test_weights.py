"""Packed weights by the slow coder: every pattern is restored, and broken arrays are refused."""

import numpy as np
import pytest
from weight_samples import MATRICES, broken_arrays

from packhorse.errors import CorruptionError
from packhorse.layout import WEIGHT_FORMATS, WeightFormat
from packhorse.reference.weights import decode_weights, encode_weights

FORMATS = pytest.mark.parametrize("format", WEIGHT_FORMATS.values(), ids=list(WEIGHT_FORMATS))


@FORMATS
@pytest.mark.parametrize("name", MATRICES)
def test_every_element_comes_back(name: str, format: WeightFormat) -> None:
    elements = MATRICES[name]()
    arrays = encode_weights(elements, format)
    decoded = decode_weights(arrays, format, elements.shape[1])
    np.testing.assert_array_equal(decoded, elements)


def test_the_size_is_what_the_page_promises() -> None:
    """12.02 and about 11.4 bits for rows as they are in models."""
    elements = MATRICES["rows of models"]()
    for format, low, high in zip(WEIGHT_FORMATS.values(), (12.0, 11.3), (12.06, 11.6), strict=True):
        nbytes = sum(array.nbytes for array in encode_weights(elements, format))
        assert low < 8 * nbytes / elements.size < high


def test_zeros_are_no_exceptions_of_w12() -> None:
    zeros = np.zeros((3, 50), np.uint16)
    zeros[1] = 0x8000
    assert encode_weights(zeros, WEIGHT_FORMATS["W12"]).exceptions.size == 0
    assert encode_weights(zeros, WEIGHT_FORMATS["W11"]).exceptions.size == 150


@FORMATS
def test_broken_arrays_are_refused(format: WeightFormat) -> None:
    elements = MATRICES["specials"]()
    broken = broken_arrays(encode_weights(elements, format), format)
    for what, wrong in broken:
        with pytest.raises(CorruptionError, match=what):
            decode_weights(wrong, format, elements.shape[1])
