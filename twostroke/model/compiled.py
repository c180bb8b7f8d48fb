"""What all kernels compiled by numba share: their cache, and the few things numba cannot say.

Kernels are given addresses and numbers (int64), not arrays: they call each other and OpenMP by
address, and run on torch's threads.
"""

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from twostroke.config import cache_dir

_Function = TypeVar("_Function", bound=Callable[..., Any])
_intrinsic: Callable[[Callable[..., Any]], Any] = intrinsic
_I32, _F32 = ir.IntType(32), ir.FloatType()


def use_kernel_cache(*files: str) -> bool:
    """Send the code that numba compiles from now on to the user's cache directory.

    False when that cannot be written. numba tells stale code by the time stamp of the file that
    defines a kernel; what it calls is in other files, so the directory is named after the text of
    all `files`.
    """
    digest = hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()
    directory = cache_dir() / "kernels" / digest[:16]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return _not_writable()
    if not os.access(directory, os.W_OK):
        return _not_writable()
    numba.config.CACHE_DIR = str(directory)
    return True


def _not_writable() -> bool:
    logging.getLogger(__name__).warning(
        "compiled kernels cannot be kept: %s is not writable; each start compiles them again; "
        "set TWOSTROKE_CACHE to a directory that is",
        cache_dir(),
    )
    return False


def inner(function: _Function) -> _Function:
    """Called from kernels; part of their code, so not kept on its own."""
    compiled: _Function = numba.njit(nogil=True, error_model="numpy")(function)
    return compiled


def kernel(*, cache: bool) -> Callable[[_Function], _Function]:
    """Called from Python; kept in the cache."""
    compiled: Callable[[_Function], _Function] = numba.njit(
        nogil=True, cache=cache, error_model="numpy"
    )
    return compiled


_KEPT: list[Any] = []  # compiled functions whose address is in use


def address_of(function: Callable[..., None], signature: Any, *, cache: bool) -> int:
    """Compile to a C function, and return its address, which stays valid."""
    compiled = numba.cfunc(signature, nopython=True, cache=cache)(function)
    _KEPT.append(compiled)
    return int(compiled.address)


# ---------------------------------------------------------------- addresses


@_intrinsic
def pointer(_context: Any, address: types.Type) -> Any:
    """An int64 as a pointer, for `numba.carray`."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), generate


@inner
def floats(address: int, count: int) -> Any:
    return numba.carray(pointer(address), (count,), np.float32)


@inner
def halves(address: int, count: int) -> Any:
    """bfloat16 values as their bits."""
    return numba.carray(pointer(address), (count,), np.uint16)


@inner
def words(address: int, count: int) -> Any:
    return numba.carray(pointer(address), (count,), np.int32)


@inner
def numbers(address: int, count: int) -> Any:
    return numba.carray(pointer(address), (count,), np.int64)


@_intrinsic
def take_ticket(_context: Any, counter: types.Type) -> Any:
    """Add 1 to the int64 at this address, atomically; returns its former value."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        where = builder.inttoptr(values[0], values[0].type.as_pointer())
        return builder.atomic_rmw("add", where, ir.Constant(values[0].type, 1), "monotonic")

    return types.int64(types.int64), generate


# ---------------------------------------------------------------- C functions by address


@_intrinsic
def call(_context: Any, function: types.Type) -> Any:
    """Call `void function(void)`."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), [])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@_intrinsic
def call_with(_context: Any, function: types.Type, argument: types.Type) -> Any:
    """Call `void function(void *argument)`."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), [values[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@_intrinsic
def call_for_int(_context: Any, function: types.Type) -> Any:
    """Call `int function(void)`."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(_I32, [])
        result = builder.call(builder.inttoptr(values[0], kind.as_pointer()), [])
        return builder.sext(result, ir.IntType(64))

    return types.int64(types.int64), generate


# ---------------------------------------------------------------- bits of numbers


@_intrinsic
def from_bf16(_context: Any, value: types.Type) -> Any:
    """The float32 of the bits of a bfloat16."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        wide = builder.shl(builder.zext(values[0], _I32), ir.Constant(_I32, 16))
        return builder.bitcast(wide, _F32)

    return types.float32(types.uint16), generate


@_intrinsic
def bits_of(_context: Any, value: types.Type) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.bitcast(values[0], _I32)

    return types.int32(types.float32), generate


@_intrinsic
def float_of(_context: Any, bits: types.Type) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.bitcast(values[0], _F32)

    return types.float32(types.int32), generate


@inner
def to_bf16(value: float) -> Any:
    """A float32 as the bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = bits_of(value)
    rounded = (bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))) >> np.int32(16)
    if value != value:
        rounded = (bits >> np.int32(16)) | np.int32(0x40)
    return np.uint16(rounded & np.int32(0xFFFF))
