"""Code for a CPU that Numba compiles and XLA calls: what `attention_cpu` and `product_cpu` share.

XLA calls a handler with one pointer to an `XLA_FFI_CallFrame`; the functions below alone know that structure
and those it leads to (jaxlib's `xla/ffi/api/c_api.h`, version 0.3, to which fields are only ever added). A
handler's work is cut into parts, which the calling thread and those of XLA's own pool take as they get to
them. Threads of ours would find XLA's on the cores, which spin for a while after each operation.

Machine code is kept on disk. Numba compiles it anew when the file of the function that was called changes,
not when only a file that it calls into does, such as this one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import llvmlite.binding
import llvmlite.ir
import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as _numba_intrinsic

FLOAT32 = 11
"""XLA_FFI_DataType."""

PARTS_PER_THREAD = 4
"""Of a call, at most: more than one, since threads do not run at the same speed."""


def _kept(decorator: Any, *arguments: Any, **options: Any) -> Any:
    """A decorator of Numba's that keeps machine code on disk, if there is a folder for it."""

    def decorate(function: Any) -> Any:
        try:
            return decorator(*arguments, cache=True, **options)(function)
        except RuntimeError:  # no folder can be written
            return decorator(*arguments, **options)(function)

    return decorate


# Sums may be reordered, which vector instructions need; NaN and infinities keep their meaning.
compiled = _kept(numba.njit, nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz", "arcp"})

intrinsic: Any = _numba_intrinsic  # its type hints know nothing of the typing context


_registered: dict[str, list[Any]] = {}  # what has to live as long as XLA may call it
_registering = threading.Lock()


def register(target: str, handler: Callable[[int], int], run_part: Callable[[int], int]) -> None:
    """Compiles a handler and what it has to run, or loads them, and makes the handler known to XLA; once.

    Args:
      handler: an XLA_FFI_Handler: address of a call frame -> 0. It hands `run_parts` what
        `pointer_to(target)` makes.
      run_part: address of frame, number of the part, number of parts: int64 [3] -> 0.
    """
    with _registering:
        if target in _registered:
            return
        callbacks = []
        for name, function in ((_TASK, _task), (target, run_part)):
            callbacks.append(_callback(function))
            # Found by name, so that code can be kept.
            llvmlite.binding.add_symbol(name, callbacks[-1].address)
        callbacks.append(_callback(handler))
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(callbacks[-1].ctypes), platform="cpu")
        _registered[target] = callbacks


def _callback(function: Callable[[int], int]) -> Any:
    return _kept(numba.cfunc, types.int64(types.int64))(function)


_TASK = "jpaged_task"

# -- addresses --------------------------------------------------------------------------------

_INTEGER = llvmlite.ir.IntType(64)
_CALLBACK = llvmlite.ir.FunctionType(_INTEGER, [_INTEGER])
_malloc: Any = types.ExternalFunction("malloc", types.int64(types.int64))
_free: Any = types.ExternalFunction("free", types.void(types.int64))
_sched_yield: Any = types.ExternalFunction("sched_yield", types.int32())


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    """An address as a pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def _call(typing_context: Any, function: Any, argument: Any) -> Any:
    """Calls the function at an address with an integer, or an address, for an integer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.call(builder.inttoptr(arguments[0], _CALLBACK.as_pointer()), [arguments[1]])

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _add(typing_context: Any, address: Any, number: Any) -> Any:
    """Adds to the integer at an address, as one indivisible operation, and returns what it was before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _INTEGER.as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


def pointer_to(name: str) -> Any:
    """A function, for compiled code, of no arguments: the address of what is registered by that name."""

    @intrinsic
    def address(typing_context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            symbol = cgutils.get_or_insert_function(builder.module, _CALLBACK, name)
            return builder.ptrtoint(symbol, _INTEGER)

        return types.int64(), generate

    return address


_task_pointer = pointer_to(_TASK)


@compiled
def words(address: int, count: int) -> np.ndarray:
    """What lies at an address, as int64 [count]."""
    return numba.carray(_pointer(address), (count,), np.int64)


@compiled
def address_of(array: np.ndarray) -> int:
    """Of the first entry, as a signed number: with others, an unsigned one would become floating point."""
    return np.int64(array.ctypes.data)  # type: ignore[return-value]


# -- call frames ------------------------------------------------------------------------------


@compiled
def answered(frame: int) -> bool:
    """Whether this is no call but XLA's question, asked once, which version a handler is written for."""
    extension = words(frame, 2)[1]
    if extension == 0:
        return False
    fields = words(extension, 4)  # size, kind, next, metadata
    if fields[1] & 0xFFFFFFFF != 1:
        return False
    words(fields[3], 4)[3] = 3 << 32  # major version 0, minor version 3
    return True


@compiled
def operands(frame: int, count: int) -> np.ndarray:
    """Addresses of the operands' buffers."""
    return words(words(frame, 10)[9], count)


@compiled
def result(frame: int) -> int:
    """Address of the buffer of the only result."""
    return words(words(frame, 15)[14], 1)[0]


@compiled
def buffer(address: int, rank: int) -> tuple[Any, np.ndarray]:
    """Data and shape of an XLA_FFI_Buffer: size, extension, dtype, data, rank, dimensions."""
    fields = words(address, 6)
    return _pointer(fields[3]), words(fields[5], rank)


@compiled
def dtype_of(address: int) -> int:
    """XLA_FFI_DataType of a buffer."""
    return words(address, 3)[2] & 0xFFFFFFFF


# -- threads ----------------------------------------------------------------------------------

# What the threads of a call share, by index: parts taken and parts done so far, threads that still hold it,
# then what it is about.
_TAKEN, _DONE, _HOLDERS, _FRAME, _PARTS, _RUN_PART, _SIZE = range(7)


@compiled
def _num_threads(frame: int) -> int:
    """Threads of XLA's pool, 1 if there is none."""
    count = np.ones(1, np.int64)
    arguments = np.array([32, 0, words(frame, 4)[3], address_of(count)])
    _is_done(frame, _call(words(words(frame, 3)[2], 19)[18], address_of(arguments)))  # ThreadPool_NumThreads
    return max(np.int64(1), count[0])


@compiled
def _is_done(frame: int, error: int) -> bool:
    """Whether a function of XLA's has returned no error; one is thrown away."""
    if error == 0:
        return True
    arguments = np.array([24, 0, error])
    _call(words(words(frame, 3)[2], 9)[8], address_of(arguments))  # Error_Destroy
    return False


@compiled
def run_parts(frame: int, most: int, run_part: int) -> None:
    """Cuts a call into parts and runs them: in this thread, and in others of XLA's pool that come in time.

    Args:
      most: parts that are worth the trouble.
    """
    threads = _num_threads(frame)
    parts = max(np.int64(1), min(PARTS_PER_THREAD * threads, most))
    others = min(threads, parts) - 1
    address = _malloc(8 * _SIZE)
    shared = words(address, _SIZE)
    shared[_TAKEN] = shared[_DONE] = 0
    shared[_HOLDERS] = others + 1
    shared[_FRAME], shared[_PARTS], shared[_RUN_PART] = frame, parts, run_part
    arguments = np.array([40, 0, words(frame, 4)[3], _task_pointer(), address])
    for _ in range(others):
        if not _is_done(frame, _call(words(words(frame, 3)[2], 18)[17], address_of(arguments))):  # Schedule
            _add(address + 8 * _HOLDERS, -1)
    _take_parts(address)
    while _add(address + 8 * _DONE, 0) < parts:  # others are at work on the last ones
        _sched_yield()
    _let_go(address)


def _task(address: int) -> int:
    """What another thread runs. It may begin after the call has ended, of which nothing is left then."""
    _take_parts(address)
    _let_go(address)
    return 0


@compiled
def _take_parts(address: int) -> None:
    shared = words(address, _SIZE)
    parts = shared[_PARTS]
    task = np.array([shared[_FRAME], 0, parts])
    while True:
        task[1] = _add(address + 8 * _TAKEN, 1)
        if task[1] >= parts:
            break
        _call(shared[_RUN_PART], address_of(task))
        _add(address + 8 * _DONE, 1)


@compiled
def _let_go(address: int) -> None:
    if _add(address + 8 * _HOLDERS, -1) == 1:
        _free(address)
