"""Compiles CUDA C++ to machine code by NVRTC, NVIDIA's compiler as a library.

The library comes with PyTorch for CUDA, or as the package `nvidia-cuda-nvrtc`. It needs no GPU.

Compiling a kernel takes a second, so machine code is kept in the folder `kernels` of
`cache_folder()`, where later processes find it. The name of a file is a hash of all that the code
depends on, also of which file the compiler is; its first bytes are a hash of the others, so a
damaged file is compiled again.
"""

import ctypes
import hashlib
import os
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from packhorse.errors import MissingBackendError
from packhorse.gpu.figure_cache import cache_folder
from packhorse.storage.atomic import atomic_file

__all__ = ["Compiler", "compiler", "find_library"]

_LEAST_VERSION = 12, 3  # the first that is tried with instructions of sm_90a that kernels use
_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
_HASH_NBYTES = 32
_REMEDY = "install it with: pip install nvidia-cuda-nvrtc"


class Compiler(NamedTuple):
    """A loaded NVRTC.

    Attributes:
        library: the library.
        path: where it was found, or its name if the system found it.
        version: its version, such as (13, 0).
    """

    library: ctypes.CDLL
    path: str
    version: tuple[int, int]

    def compile(self, source: str, options: tuple[str, ...]) -> bytes:
        """Machine code of a program.

        Args:
            source: CUDA C++ without includes.
            options: of NVRTC. One of them names a real architecture.

        Returns:
            A cubin.

        Raises:
            ValueError: the program has an error, which the message shows.
        """
        return self._compile(source, options, "CUBIN")

    def compile_once(self, source: str, options: tuple[str, ...]) -> bytes:
        """The same as `compile`, but from the folder of kept kernels if it is there; if not, it is
        written there. A folder that cannot be written costs time only.

        Raises:
            ValueError: as `compile`.
        """
        depends_on = self.version, _identity(self.path), options, source
        named = hashlib.sha256(repr(depends_on).encode()).hexdigest()
        path = cache_folder() / "kernels" / f"{named}.cubin"
        if not path.is_absolute():  # nobody knows where home is
            return self.compile(source, options)
        with suppress(OSError):
            kept = path.read_bytes()
            if hashlib.sha256(kept[_HASH_NBYTES:]).digest() == kept[:_HASH_NBYTES]:
                return kept[_HASH_NBYTES:]
        code = self.compile(source, options)
        with suppress(OSError, ValueError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(path, force=True) as file:
                file.write(hashlib.sha256(code).digest() + code)
        return code

    def compile_to_ptx(self, source: str, options: tuple[str, ...]) -> str:
        """The same, but PTX, the text before machine code."""
        return self._compile(source, options, "PTX").rstrip(b"\0").decode()

    def _compile(self, source: str, options: tuple[str, ...], kind: str) -> bytes:
        library, program = self.library, ctypes.c_void_p()
        encoded = [option.encode() for option in options]
        self._check(
            library.nvrtcCreateProgram(
                ctypes.byref(program), source.encode(), b"packhorse.cu", 0, None, None
            )
        )
        try:
            array = (ctypes.c_char_p * len(encoded))(*encoded)
            if library.nvrtcCompileProgram(program, len(encoded), array):
                log = self._read(program, "ProgramLog").decode(errors="replace").strip("\0\n")
                raise ValueError(f"NVRTC {self.version} cannot compile the kernel:\n{log}")
            return self._read(program, kind)
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        content = ctypes.create_string_buffer(size.value)
        self._check(getattr(self.library, f"nvrtcGet{what}")(program, content))
        return content.raw

    def _check(self, result: int) -> None:
        if result:
            self.library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise ValueError(f"NVRTC failed: {self.library.nvrtcGetErrorString(result).decode()}")


@cache
def _identity(path: str) -> tuple[int, int] | None:
    """Size and time of a library; None if only the system knows where it is."""
    with suppress(OSError):
        found = os.stat(path)
        return found.st_size, found.st_mtime_ns
    return None


@cache
def compiler() -> Compiler:
    """The compiler of this machine.

    Raises:
        MissingBackendError: there is no NVRTC, or it is too old.
    """
    path = find_library()
    try:
        for part in Path(path).parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(part))  # the library finds it by its name, if it is loaded
        library = ctypes.CDLL(path)
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    except (OSError, AttributeError) as error:
        raise MissingBackendError(f"{path} cannot be used ({error}); {_REMEDY}") from error
    version = major.value, minor.value
    if version < _LEAST_VERSION:
        least = ".".join(map(str, _LEAST_VERSION))
        raise MissingBackendError(f"{path} is NVRTC {version}; kernels need {least}; {_REMEDY}")
    return Compiler(library, path, version)


def find_library() -> str:
    """The path of an NVRTC that is installed as a package, the newest first.

    Raises:
        MissingBackendError: there is none.
    """
    found = sorted((path for folder in _folders() for path in _libraries(folder)), reverse=True)
    if found:
        return str(found[0][1])
    for name in _NAMES:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    raise MissingBackendError(f"there is no NVRTC on this machine; {_REMEDY}")


def _folders() -> list[Path]:
    spec = find_spec("nvidia")
    return [Path(root) for root in spec.submodule_search_locations or ()] if spec else []


def _libraries(folder: Path) -> list[tuple[int, Path]]:
    found = folder.glob("*/lib/libnvrtc.so.*")
    return [(int(path.suffix[1:]), path) for path in found if path.suffix[1:].isdigit()]
