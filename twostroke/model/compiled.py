"""What all kernels compiled by numba share: their cache, and the few things numba cannot say.

Kernels are given addresses and numbers (int64), not arrays: they call each other and OpenMP by
address, and run on torch's threads.
"""

import hashlib
import logging
import os
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import caching, cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

from twostroke.config import cache_dir

_Function = TypeVar("_Function", bound=Callable[..., Any])
in_llvm: Callable[[Callable[..., Any]], Any] = intrinsic
_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()


def _target() -> tuple[str, str]:
    """Name and features, as LLVM has them, of the processor that code is made for: this one.

    numba's settings NUMBA_CPU_NAME and NUMBA_CPU_FEATURES name another one, and then all kernels
    are made for that: to share a cache among unlike machines, or to try what an older one runs.
    """
    features = numba.config.CPU_FEATURES
    if features is None:
        features = get_host_cpu_features()
    return numba.config.CPU_NAME or binding.get_host_cpu_name(), features


CPU_NAME, CPU_FEATURES = _target()


def has(*features: str) -> bool:
    """Whether the processor that code is made for has these features, as LLVM names them."""
    return {f"+{name}" for name in features} <= set(CPU_FEATURES.split(","))


HAS_BF16 = has("avx512bf16", "avx512vl")
HAS_VNNI = has("avx512vnni")


class BFloatType(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloatType)

    def __hash__(self) -> int:
        return hash(BFloatType)


def use_kernel_cache(*files: str) -> str:
    """Send the code that numba compiles from now on to the user's cache directory.

    Returns where in it; empty when that cannot be written. numba tells stale code by the time stamp
    of the file that defines a kernel; what it calls is in other files, so the directory is named
    after the text of all `files`.
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
    caching.IndexDataCacheFile.load = _load_if_sound
    return str(directory)


_load: Callable[[Any, Any], Any] = caching.IndexDataCacheFile.load


def _load_if_sound(file: Any, key: Any) -> Any:
    """What numba keeps under a key; a damaged file, at which it would fail, is as good as none."""
    try:
        return _load(file, key)
    except Exception as error:  # of what reads pickles, any
        logging.getLogger(__name__).warning(
            "a compiled kernel is damaged (%s: %s) and compiled again; it was in %s",
            type(error).__name__,
            error,
            numba.config.CACHE_DIR,
        )
        file.flush()
        return None


def _not_writable() -> str:
    logging.getLogger(__name__).warning(
        "compiled kernels cannot be kept: %s is not writable; each start compiles them again; "
        "set TWOSTROKE_CACHE to a directory that is",
        cache_dir(),
    )
    return ""


def inner(function: _Function) -> _Function:
    """Called from kernels; part of their code, so not kept on its own."""
    compiled: _Function = numba.njit(nogil=True, error_model="numpy")(function)
    return compiled


def kernel(*, cache: str, nogil: bool = True) -> Callable[[_Function], _Function]:
    """Called from Python; kept in the cache.

    Without `nogil` where it takes microseconds, and what comes after it should not wait for all
    that another thread, to which the lock would go, has to do (see `worker.input_rows`).
    """
    compiled: Callable[[_Function], _Function] = numba.njit(
        nogil=nogil, cache=bool(cache), error_model="numpy"
    )
    return compiled


_KEPT: list[Any] = []  # compiled functions whose address is in use
_COMPILING = threading.Lock()  # where code is kept is a setting of the whole process


def address_of(function: Callable[..., None], signature: Any, *, cache: str) -> int:
    """Compile to a C function, and return its address, which stays valid.

    `cache` is what `use_kernel_cache` said: by now, another file may have asked for its own.
    """
    with _COMPILING:
        if cache:
            numba.config.CACHE_DIR = cache
        compiled = numba.cfunc(signature, nopython=True, cache=bool(cache))(function)
    _KEPT.append(compiled)
    return int(compiled.address)


# ---------------------------------------------------------------- addresses


@in_llvm
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
def int8s(address: int, count: int) -> Any:
    return numba.carray(pointer(address), (count,), np.int8)


@inner
def words(address: int, count: int) -> Any:
    return numba.carray(pointer(address), (count,), np.int32)


@inner
def numbers(address: int, count: int) -> Any:
    return numba.carray(pointer(address), (count,), np.int64)


@in_llvm
def add_atomically(_context: Any, counter: types.Type, value: types.Type) -> Any:
    """Add to the int64 at this address; returns its former value. Orders memory both ways."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        where = builder.inttoptr(values[0], values[0].type.as_pointer())
        return builder.atomic_rmw("add", where, values[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@inner
def take_ticket(counter: int) -> Any:
    """Add 1 to the int64 at this address, atomically; returns its former value."""
    return add_atomically(counter, 1)


@in_llvm
def load_atomically(_context: Any, address: types.Type) -> Any:
    """The int64 at this address; what comes after is read after it."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        where = builder.inttoptr(values[0], values[0].type.as_pointer())
        return builder.load_atomic(where, "acquire", 8)

    return types.int64(types.int64), generate


@in_llvm
def store_atomically(_context: Any, address: types.Type, value: types.Type) -> Any:
    """Write the int64 at this address; what comes before is written before it."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        where = builder.inttoptr(values[0], values[0].type.as_pointer())
        builder.store_atomic(values[1], where, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@in_llvm
def pause(_context: Any) -> Any:
    """Say that this thread only waits, where the processor has a word for it.

    ARM's own word, `yield`, most of its processors pass over; `isb` takes them about as long as
    `pause` takes an x86.
    """

    def generate(context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        machine = platform.machine()
        if machine in ("x86_64", "AMD64"):
            _call_void(builder, "llvm.x86.sse2.pause")
        elif machine in ("aarch64", "arm64"):
            _call_void(builder, "llvm.aarch64.isb", ir.Constant(_I32, _ISB_SY))
        return context.get_dummy_value()

    return types.void(), generate


_ISB_SY = 15  # the only kind that there is


def _call_void(builder: Any, name: str, *arguments: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


# ---------------------------------------------------------------- C functions by address


@in_llvm
def call(_context: Any, function: types.Type) -> Any:
    """Call `void function(void)`."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), [])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@in_llvm
def call_with(_context: Any, function: types.Type, argument: types.Type) -> Any:
    """Call `void function(void *argument)`."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), [values[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@in_llvm
def call_for_int(_context: Any, function: types.Type) -> Any:
    """Call `int function(void)`."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(_I32, [])
        result = builder.call(builder.inttoptr(values[0], kind.as_pointer()), [])
        return builder.sext(result, ir.IntType(64))

    return types.int64(types.int64), generate


@in_llvm
def clock_ns(_context: Any, clock_gettime: types.Type) -> Any:
    """Nanoseconds of the monotonic clock, by libc's function at this address."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        i64 = values[0].type
        kind = ir.FunctionType(_I32, [_I32, i64.as_pointer()])
        time_at = cgutils.alloca_once(builder, i64, 2)
        which = ir.Constant(_I32, time.CLOCK_MONOTONIC)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), [which, time_at])
        seconds = builder.load(time_at)
        rest = builder.load(builder.gep(time_at, [ir.Constant(_I32, 1)]))
        return builder.add(builder.mul(seconds, ir.Constant(i64, 10**9)), rest)

    return types.int64(types.int64), generate


# ---------------------------------------------------------------- bits of numbers


@in_llvm
def from_bf16(_context: Any, value: types.Type) -> Any:
    """The float32 of the bits of a bfloat16."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        wide = builder.shl(builder.zext(values[0], _I32), ir.Constant(_I32, 16))
        return builder.bitcast(wide, _F32)

    return types.float32(types.uint16), generate


@in_llvm
def bits_of(_context: Any, value: types.Type) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.bitcast(values[0], _I32)

    return types.int32(types.float32), generate


@in_llvm
def float_of(_context: Any, bits: types.Type) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.bitcast(values[0], _F32)

    return types.float32(types.int32), generate


@in_llvm
def largest_bits(_context: Any, address: types.Type) -> Any:
    """Of 32 float32 there, the bits of the one that is largest without its sign, without it.

    Bits of positive numbers are in the order of the numbers, with infinity and then NaN as the
    largest. (LLVM makes no vectors of such a loop: it unrolls 32 steps before it looks for any.)
    """

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        kind = ir.VectorType(_I32, 32)
        bits = builder.load(builder.inttoptr(values[0], kind.as_pointer()), align=4)
        unsigned = builder.and_(bits, ir.Constant(kind, [0x7FFFFFFF] * 32))
        reduce = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_I32, [kind]), "llvm.vector.reduce.smax.v32i32"
        )
        return builder.call(reduce, [unsigned])

    return types.int32(types.int64), generate


@in_llvm
def to_bf16(_context: Any, value: types.Type) -> Any:
    """A float32 as the bits of the nearest bfloat16, ties to even; NaN stays NaN.

    In a loop, LLVM makes vectors of it: of the processor's own conversion where it has one (which
    takes what is below 2**-126 for 0), else of integers of 32 bits.
    """

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        if HAS_BF16:
            return builder.bitcast(builder.fptrunc(values[0], BFloatType()), _I16)
        bits, sixteen = builder.bitcast(values[0], _I32), ir.Constant(_I32, 16)
        tie = builder.and_(builder.lshr(bits, sixteen), ir.Constant(_I32, 1))
        rounded = builder.add(bits, builder.add(tie, ir.Constant(_I32, 0x7FFF)))
        # Rounding could carry a NaN's payload into its sign: keep NaNs as they are, quiet.
        quiet = builder.or_(bits, ir.Constant(_I32, 0x400000))
        is_nan = builder.fcmp_unordered("uno", values[0], values[0])
        whole = builder.select(is_nan, quiet, rounded)
        return builder.trunc(builder.lshr(whole, sixteen), _I16)

    return types.uint16(types.float32), generate


@in_llvm
def fma(_context: Any, a: types.Type, b: types.Type, c: types.Type) -> Any:
    """a * b + c of float32; in one operation where the processor has it."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(_F32, [_F32] * 3)
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.fmuladd.f32")
        return builder.call(function, values)

    return types.float32(types.float32, types.float32, types.float32), generate
