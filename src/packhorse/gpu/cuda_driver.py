"""NVIDIA's driver, as far as kernels need it that Triton did not compile: modules, tensor maps,
launches. PyTorch has made a context of the current device."""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

from packhorse.errors import MissingBackendError

__all__ = ["Driver", "DriverError", "Kernel", "TensorMap", "driver"]

_SHARED_NBYTES = 8  # of attributes of functions: the most shared memory of a program
_EARLY = 6  # of attributes of launches: start while the kernel before ends
_UINT8 = 0
_SWIZZLE_128 = 3
_PROMOTION_256 = 3  # a miss fetches 256 bytes to L2
_MAP_NBYTES, _MAP_ALIGNMENT = 128, 64


class DriverError(RuntimeError):
    """The driver refuses a call."""


class TensorMap:
    """What a copy must know about a tensor of bytes; kept where the driver wants it."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(_MAP_NBYTES + _MAP_ALIGNMENT)
        start = ctypes.addressof(self._memory)
        self.address = -(-start // _MAP_ALIGNMENT) * _MAP_ALIGNMENT


class _Value(ctypes.Union):
    _fields_ = (("flag", ctypes.c_int), ("_rest", ctypes.c_char * 64))


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("_rest", ctypes.c_char * 4), ("value", _Value))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_nbytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("n_attributes", ctypes.c_uint),
    )


class Kernel:
    """A kernel of a loaded module, with the launches that were prepared for it.

    Attributes:
        function: the driver's handle.
        n_threads: threads of a program.
        shared_nbytes: dynamic shared memory of a program.
    """

    def __init__(
        self, library: Any, module: ctypes.c_void_p, name: str, n_threads: int, shared_nbytes: int
    ) -> None:
        self._library, self._module = library, module  # the module must live as long
        self.n_threads, self.shared_nbytes = n_threads, shared_nbytes
        self.function = ctypes.c_void_p()
        _check(
            library,
            library.cuModuleGetFunction(ctypes.byref(self.function), module, name.encode()),
        )
        _check(
            library, library.cuFuncSetAttribute(self.function, _SHARED_NBYTES, int(shared_nbytes))
        )

    def n_resident(self, cluster: int, n_processors: int) -> int:
        """Clusters that the GPU runs at once."""
        found = ctypes.c_int()
        if cluster > 1:
            launch = self._launch(cluster, 0)
            call = self._library.cuOccupancyMaxActiveClusters
            _check(self._library, call(ctypes.byref(found), self.function, ctypes.byref(launch)))
            return max(found.value, 1)
        call = self._library.cuOccupancyMaxActiveBlocksPerMultiprocessor
        nbytes = ctypes.c_size_t(self.shared_nbytes)
        _check(self._library, call(ctypes.byref(found), self.function, self.n_threads, nbytes))
        return max(found.value, 1) * n_processors

    def _launch(self, n_programs: int, stream: int) -> _Launch:
        return _Launch(
            (n_programs, 1, 1), (self.n_threads, 1, 1), self.shared_nbytes, stream, None, 0
        )

    def __call__(
        self, n_programs: int, stream: int, arguments: Sequence[Any], *, early: bool
    ) -> None:
        """Launches programs.

        Args:
            n_programs: how many.
            stream: the driver's handle of a stream.
            arguments: of the kernel: values of ctypes, or tensor maps.
            early: whether they may start while the kernel before ends. They must wait for it.

        Raises:
            DriverError: the driver refuses.
        """
        launch = self._launch(n_programs, stream)
        if early:
            attribute = _Attribute(_EARLY, b"", _Value(flag=1))
            launch.attributes, launch.n_attributes = ctypes.pointer(attribute), 1
        places = [
            each.address if isinstance(each, TensorMap) else ctypes.addressof(each)
            for each in arguments
        ]
        array = (ctypes.c_void_p * len(places))(*places)
        call = self._library.cuLaunchKernelEx
        _check(self._library, call(ctypes.byref(launch), self.function, array, None))


class Driver:
    """The driver's library."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def load(self, binary: bytes) -> ctypes.c_void_p:
        """Loads machine code to the current device.

        Raises:
            DriverError: it is not for this device, or the driver is too old for it.
        """
        module = ctypes.c_void_p()
        _check(self._library, self._library.cuModuleLoadData(ctypes.byref(module), binary))
        return module

    def kernel(
        self, module: ctypes.c_void_p, name: str, n_threads: int, shared_nbytes: int = 0
    ) -> Kernel:
        """A kernel of a module.

        Raises:
            DriverError: there is none of this name, or it does not fit.
        """
        return Kernel(self._library, module, name, n_threads, shared_nbytes)

    def describe(
        self,
        address: int,
        sizes: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        *,
        swizzle: bool,
    ) -> TensorMap:
        """Describes a tensor of bytes with three dimensions, the innermost first.

        Args:
            address: of its first byte; a multiple of 16.
            sizes: of the dimensions.
            strides: bytes from an index to the next one, for the last two dimensions.
            box: what a copy takes.
            swizzle: whether copies swizzle each 8 rows of 128 bytes.

        Raises:
            DriverError: the driver refuses.
        """
        found = TensorMap()
        _check(
            self._library,
            self._library.cuTensorMapEncodeTiled(
                ctypes.c_void_p(found.address),
                _UINT8,
                3,
                ctypes.c_void_p(address),
                (ctypes.c_uint64 * 3)(*sizes),
                (ctypes.c_uint64 * 2)(*strides),
                (ctypes.c_uint32 * 3)(*box),
                (ctypes.c_uint32 * 3)(1, 1, 1),
                0,
                _SWIZZLE_128 if swizzle else 0,
                _PROMOTION_256,
                0,
            ),
        )
        return found


def _check(library: Any, result: int) -> None:
    if result:
        text = ctypes.c_char_p()
        library.cuGetErrorString(result, ctypes.byref(text))
        what = text.value.decode() if text.value else "an unknown error"
        raise DriverError(f"the driver of the GPU reports: {what} ({result})")


@cache
def driver() -> Driver:
    """The driver of this machine.

    Raises:
        MissingBackendError: there is none, or it is older than tensor maps and clusters.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
        for name in ("cuTensorMapEncodeTiled", "cuLaunchKernelEx", "cuOccupancyMaxActiveClusters"):
            getattr(library, name)
    except (OSError, AttributeError) as error:
        raise MissingBackendError(
            f"the driver of the GPU cannot be used ({error}); it must be of CUDA 12 or later"
        ) from error
    return Driver(library)
