"""Documents of JSON: what is looked at once for many tensors is still looked at."""

from typing import Any

import pytest

from packhorse.errors import CorruptionError
from packhorse.storage.documents import Document
from packhorse.storage.strict_json import parse_json


@pytest.mark.parametrize("first", [[1], [0, 1], [2, 1]])
@pytest.mark.parametrize("other", [True, False, 1.0, 0.0, "1", None, [1]])
def test_a_shape_that_is_equal_to_one_before_is_still_checked(first: list[Any], other: Any) -> None:
    document = Document(b"{}", "m")
    for place in range(len(first)):
        assert document.shape(first, "t") == document.shape(list(first), "t") == tuple(first)
        junk = [*first[:place], other, *first[place + 1 :]]
        with pytest.raises(CorruptionError, match="m: t: a size is"):
            document.shape(junk, "t")


@pytest.mark.parametrize("value", [(1,), "1", {1: 1}, 1, [1] * 65, [1 << 62, 1 << 62], [-1]])
def test_what_is_no_shape_is_refused_each_time(value: Any) -> None:
    document = Document(b"{}", "m")
    assert document.shape([1], "t") == (1,)
    for _ in range(2):
        with pytest.raises(CorruptionError, match="m: t: "):
            document.shape(value, "t")


@pytest.mark.parametrize(
    "text",
    [
        rb'{"a":"\ud800"}',
        rb'{"\ud800":1}',
        rb'{"a":[["x","\uDBFF"]]}',
        rb'{"a":[{"b":"\udfff\ud83d"}]}',
        rb'{"a":{"b":{"\udc00x":1}}}',
    ],
)
def test_lone_surrogates_are_found_anywhere(text: bytes) -> None:
    with pytest.raises(CorruptionError, match="is not Unicode text"):
        parse_json(text, label="m")
    with pytest.raises(CorruptionError, match="m is not UTF-8: byte 0xed at byte 6"):
        parse_json(b'{"a":"\xed\xa0\x80"}', label="m")


def test_escapes_that_are_text_are_kept() -> None:
    text = rb'{"\u0061":["\ud83d\udc34","\\ud800","\n"]}'
    assert parse_json(text, label="m") == {"a": ["\U0001f434", "\\ud800", "\n"]}


@pytest.mark.parametrize("text", [rb'{"\u0061":1,"b":2,"a":3}', b'{"a":1,"b":2,"a":3}'])
def test_keys_that_occur_twice_are_named(text: bytes) -> None:
    for document in (text, b'{"x":[' + text + b"]}"):
        with pytest.raises(CorruptionError, match="the key 'a' occurs twice in one object"):
            parse_json(document, label="m")
