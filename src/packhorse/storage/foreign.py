"""Recognises files that people pass by mistake, by their first bytes, and says what to do instead.

An error names the kind of such a file, so that nobody takes a good file of another kind for a
damaged one.
"""

import re

__all__ = ["FOREIGN_SUFFIXES", "PEEK_NBYTES", "kind_of_file"]

PEEK_NBYTES = 512  # the mark of a tar archive is at byte 257

_CONVERT = "export it to safetensors first"
_UNPACK = "extract the model from it"
_KINDS = (
    (
        b"version https://git-lfs",
        "a Git LFS pointer, not the model",
        "fetch it with `git lfs pull`",
    ),
    (b"GGUF", "a GGUF file", "Packhorse packs safetensors: use the model that it was made from"),
    (b"\x93NUMPY", "an array of NumPy (.npy)", "save it with packhorse.numpy.save_file"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", _CONVERT),
    (b"PAR1", "a Parquet file", "Packhorse packs tensors, not tables"),
    (b"ARROW1", "an Arrow file", "Packhorse packs tensors, not tables"),
    (b"\x1f\x8b", "a gzip archive", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "a Zstandard archive", _UNPACK),
    (b"\xfd7zXZ", "an xz archive", _UNPACK),
    (b"BZh", "a bzip2 archive", _UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (b"\x89PHF", "a single packed tensor", "read it with packhorse.Frame.from_buffer"),
)
_ONNX = re.compile(rb"\x08[\x01-\x20][\x12\x1a\x22\x2a\x32\x3a\x42]", re.DOTALL)
_PICKLE = re.compile(rb"\x80[\x02-\x05]", re.DOTALL)
_PAGE = re.compile(rb"\s*<(!doctype|html|\?xml)", re.IGNORECASE)
_JSON = re.compile(rb"\s*[{\[]\s*[\[{\"\]}]")
_TORCH = "convert it to safetensors first; docs/cli.md says how"

# In folders, files of other kinds are recognised by their names.
FOREIGN_SUFFIXES = {
    ".gguf": "GGUF",
    ".onnx": "ONNX",
    ".h5": "HDF5",
    ".hdf5": "HDF5",
    ".keras": "Keras",
    ".npy": "NumPy",
    ".npz": "NumPy",
    ".msgpack": "Flax",
    ".tflite": "TensorFlow Lite",
    ".pb": "TensorFlow",
}


def kind_of_file(start: bytes) -> str:
    """The kind of a file and what to do with it, as `NAME: ADVICE`; empty if it is unknown.

    Args:
        start: the first `PEEK_NBYTES` bytes of the file, or all if there are fewer.
    """
    for magic, name, advice in _KINDS:
        if start.startswith(magic):
            return f"{name}: {advice}"
    if start.startswith(b"PK\x03\x04"):
        return _zip(start)
    if start[257:262] == b"ustar":
        return f"a tar archive: {_UNPACK}"
    if _PICKLE.match(start):
        return f"perhaps a Python pickle: {_TORCH}"
    if _ONNX.match(start):
        return f"perhaps an ONNX file: {_CONVERT}"
    return _text(start)


def _zip(start: bytes) -> str:
    """The kind of a zip archive, by the name of its first member."""
    nbytes = int.from_bytes(start[26:28], "little")
    member = start[30 : 30 + nbytes]
    if member.endswith((b"/data.pkl", b"/.format_version", b"/byteorder")):
        return f"a checkpoint of PyTorch, which is a zip archive of pickles: {_TORCH}"
    if member.endswith(b".npy"):
        return "arrays of NumPy (.npz), a zip archive: save them with packhorse.numpy.save_file"
    return f"a zip archive: {_UNPACK}; if it is a checkpoint of PyTorch, {_TORCH}"


def _text(start: bytes) -> str:
    if _JSON.match(start):
        return "JSON, perhaps a config or an index: name the folder that it is in"
    if _PAGE.match(start):
        return "a web page, perhaps an error page of a failed download: get the file again"
    try:
        text = start.decode()
    except UnicodeDecodeError as error:
        if error.start < len(start) - 3:  # otherwise the peek ends inside a character
            return ""
        text = start[: error.start].decode()
    is_text = text != "" and all(letter.isprintable() or letter in "\n\r\t\f" for letter in text)
    return "text: name a model file" if is_text else ""
