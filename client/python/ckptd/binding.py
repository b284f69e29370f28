# SPDX-License-Identifier: Apache-2.0
"""libckpt through ctypes: the structures and functions of ckpt.h, one to one, with exceptions for errors.

Nothing here knows of tensors. `Handle` is one ``ckpt *``: its methods take and give plain numbers, strings
and addresses. Calls that may take long run in a helper thread while the caller waits in slices, so that
Ctrl-C is served at once; an interrupted call is left to end by its deadline, and the next call on the handle
waits for it first, because a handle belongs to one thread at a time.
"""
from __future__ import annotations

import ctypes
import logging
import os
import pathlib
import threading
import time
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, Callable, Iterable, Optional, Sequence

from .errors import CheckpointError, DeadlinePassed, LibraryMissing

log = logging.getLogger("ckptd")

OK, SKIPPED, ALREADY, NONE, PENDING = range(5)
E_INVALID, E_MEMORY, E_UNREACHABLE, E_TIMEOUT, E_PROTOCOL, E_VERSION, E_LIMIT = range(-1, -8, -1)
E_DENIED, E_HELD, E_IO, E_DAMAGED, E_NOT_FOUND, E_EXISTS, E_BUG, E_FORKED = range(-8, -16, -1)
E_LOST, E_CONFLICT, E_STOPPING, E_MISMATCH = range(-16, -20, -1)

CAPTURED, LOCAL, PARTNER, GLOBAL = range(1, 5)
RANK_LOCAL, EAGER = 1, 2
PART, VERSION = 0, 1
RESTORE_LATEST, RESTORE_STEP, RESTORE_EXACT = range(3)
NO_WAIT = (1 << 64) - 1

#: The driver's number for the default stream of whichever thread asks (CU_STREAM_PER_THREAD).
STREAM_PER_THREAD = 2

#: dtype codes by safetensors' names (lower case).
DTYPES = {
    name: code
    for code, name in enumerate(
        "bool u8 i8 f8_e5m2 f8_e4m3 i16 u16 f16 bf16 i32 u32 f32 i64 u64 f64 c64 c128".split(), start=1
    )
}
DTYPE_NAMES = {code: name for name, code in DTYPES.items()}
DTYPE_SIZES = {
    code: 1 if code <= 5 else 2 if code <= 9 else 4 if code <= 12 else 16 if name == "c128" else 8
    for code, name in DTYPE_NAMES.items()
}

#: How long `Handle.close` waits for a call that was interrupted, in seconds.
CLOSE_PATIENCE = 5.0

#: The longest that one blocking C call is waited for before signals are served again, in seconds.
SLICE = 0.2


class OpenOptions(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32), ("rank", c_uint32), ("world", c_uint32), ("flags", c_uint32),
        ("run_id", c_char_p), ("directory", c_char_p), ("socket", c_char_p), ("daemon", c_char_p),
        ("open_timeout_ms", c_uint64), ("busy_timeout_ms", c_uint64),
    ]


class Info(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32), ("rank", c_uint32), ("world", c_uint32), ("connected", c_uint32),
        ("generation", c_uint64), ("resumes", c_uint32), ("levels", c_uint32),
        ("resume_generation", c_uint64), ("resume_step", c_uint64), ("push", c_uint32), ("reserved", c_uint32),
        ("image_size", c_uint64), ("saves", c_uint64), ("skipped", c_uint64), ("lost", c_uint64),
        ("push_reason", c_char_p),
    ]


class Shard(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32), ("dtype", c_uint32), ("name", c_char_p), ("data", c_void_p),
        ("dimensions", c_uint32), ("flags", c_uint32),
        ("shape", POINTER(c_uint64)), ("offset", POINTER(c_uint64)), ("extent", POINTER(c_uint64)),
        ("stride", POINTER(c_int64)),
        ("range", c_uint32), ("replica_index", c_uint32), ("replica_count", c_uint32), ("reserved", c_uint32),
        ("start", c_uint64), ("count", c_uint64),
    ]


class SaveOptions(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32), ("to", c_uint32), ("state", c_void_p), ("state_size", c_uint64),
        ("urgent", c_uint32), ("check", c_uint32), ("busy_timeout_ms", c_uint64),
        ("streams", POINTER(c_void_p)), ("stream_count", c_uint32), ("reserved", c_uint32),
    ]


class DeviceUsage(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32), ("contexts", c_uint32), ("imports", c_uint32), ("reserved", c_uint32),
        ("context_bytes", c_uint64), ("import_bytes", c_uint64), ("arena_bytes", c_uint64),
    ]


class Durable(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32), ("reserved", c_uint32), ("generation", c_uint64), ("step", c_uint64), ("age_ms", c_uint64),
    ]


class VersionEntry(ctypes.Structure):
    _fields_ = [
        ("generation", c_uint64), ("step", c_uint64), ("bytes", c_uint64), ("created_ns", c_uint64),
        ("world", c_uint32), ("levels", c_uint32), ("flags", c_uint32), ("reserved", c_uint32),
    ]


class RestoreOptions(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32), ("which", c_uint32), ("generation", c_uint64), ("step", c_uint64), ("timeout_ms", c_uint64),
    ]


class RestoreInfo(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32), ("world", c_uint32), ("generation", c_uint64), ("step", c_uint64),
        ("bytes", c_uint64), ("tensors", c_uint64),
    ]


class TensorEntry(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32), ("dtype", c_uint32), ("name", c_char_p), ("dimensions", c_uint32), ("flags", c_uint32),
        ("rank", c_uint32), ("pieces", c_uint32), ("shape", POINTER(c_uint64)), ("alias_of", c_char_p),
    ]


class Read(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32), ("dtype", c_uint32), ("name", c_char_p), ("data", c_void_p),
        ("dimensions", c_uint32), ("flags", c_uint32),
        ("shape", POINTER(c_uint64)), ("offset", POINTER(c_uint64)), ("extent", POINTER(c_uint64)),
        ("stride", POINTER(c_int64)),
        ("range", c_uint32), ("rank", c_uint32), ("start", c_uint64), ("count", c_uint64),
        ("stream", c_void_p), ("on_stream", c_uint32), ("reserved", c_uint32),
    ]


_SIGNATURES: "dict[str, tuple[Any, list[Any]]]" = {
    "ckpt_version": (c_char_p, []),
    "ckpt_strerror": (c_char_p, [c_int]),
    "ckpt_strerror_last": (c_char_p, []),
    "ckpt_open": (c_int, [c_char_p, POINTER(OpenOptions), POINTER(c_void_p)]),
    "ckpt_close": (c_int, [c_void_p]),
    "ckpt_get_info": (c_int, [c_void_p, POINTER(Info)]),
    "ckpt_protect": (c_int, [c_void_p, POINTER(Shard), POINTER(c_uint64)]),
    "ckpt_alias": (c_int, [c_void_p, c_char_p, c_char_p]),
    "ckpt_unprotect": (c_int, [c_void_p, c_uint64]),
    "ckpt_unprotect_all": (c_int, [c_void_p]),
    "ckpt_quiet": (c_int, [c_void_p, c_uint32]),
    "ckpt_release_imports": (c_int, [c_void_p]),
    "ckpt_device_usage": (c_int, [c_void_p, POINTER(DeviceUsage)]),
    "ckpt_save": (c_int, [c_void_p, c_uint64, POINTER(SaveOptions)]),
    "ckpt_fence": (c_int, [c_void_p, c_uint64]),
    "ckpt_wait": (c_int, [c_void_p, c_uint64, c_uint32, c_uint32, c_uint64]),
    "ckpt_test": (c_int, [c_void_p, c_uint64, c_uint32, c_uint32]),
    "ckpt_last_durable": (c_int, [c_void_p, c_uint32, POINTER(Durable)]),
    "ckpt_versions": (c_int, [c_void_p, POINTER(POINTER(VersionEntry)), POINTER(c_size_t)]),
    "ckpt_versions_free": (None, [POINTER(VersionEntry)]),
    "ckpt_restore_open": (c_int, [c_void_p, POINTER(RestoreOptions), POINTER(c_void_p)]),
    "ckpt_restore_close": (None, [c_void_p]),
    "ckpt_restore_get_info": (c_int, [c_void_p, POINTER(RestoreInfo)]),
    "ckpt_restore_tensor": (c_int, [c_void_p, c_uint64, POINTER(TensorEntry)]),
    "ckpt_restore_read_many": (c_int, [c_void_p, POINTER(Read), c_size_t]),
    "ckpt_restore_state": (c_int, [c_void_p, c_uint32, POINTER(c_void_p), POINTER(c_uint64)]),
}


def candidates() -> "list[str]":
    """Where the library is looked for, in order: ``CKPT_LIBRARY`` alone if set; the libraries of the prefix
    that the package is installed in; then the dynamic linker's own search."""
    chosen = os.environ.get("CKPT_LIBRARY")
    if chosen:
        return [chosen]
    found = []
    for parent in pathlib.Path(__file__).resolve().parents:
        for pattern in ("lib/libckpt.so.0", "lib64/libckpt.so.0", "lib/*-linux-*/libckpt.so.0"):
            found += sorted(str(path) for path in parent.glob(pattern))
    return found + ["libckpt.so.0"]


def load() -> ctypes.CDLL:
    """The library with its functions' types set. LibraryMissing says where it was looked for."""
    failures = []
    for path in candidates():
        try:
            library = ctypes.CDLL(path)
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
            return library
        except (OSError, AttributeError) as error:
            failures.append("%s (%s)" % (path, error))
    raise LibraryMissing(
        "libckpt.so.0 was not found: install ckptd's client library, or set CKPT_LIBRARY to its path. Tried: "
        + "; ".join(failures)
    )


def array_u64(values: Sequence[int]) -> Any:
    return (c_uint64 * max(1, len(values)))(*values)


def array_i64(values: Sequence[int]) -> Any:
    return (c_int64 * max(1, len(values)))(*values)


def _sized(kind: Any, **fields: Any) -> Any:
    return kind(size=ctypes.sizeof(kind), **fields)


def _text(value: "str | None") -> "bytes | None":
    return None if value is None else os.fsencode(value)


def milliseconds(seconds: float) -> int:
    """A deadline for the library: at least 1 ms, because 0 means its default."""
    return max(1, min(int(seconds * 1000), 1 << 62))


class _Call(threading.Thread):
    """One C call in a thread of its own. Its end is an event, not the thread's: where a signal handler raises in
    Thread.join(), Python up to 3.12 takes the thread for ended, while it still uses the handle."""

    def __init__(self, function: Callable[[], Any]):
        super().__init__(name="ckptd-call", daemon=True)
        self.function = function
        self.value: Any = None
        self.error: "BaseException | None" = None
        self.over = threading.Event()

    def run(self) -> None:
        try:
            self.value = self.function()
        except BaseException as error:
            self.error = error
        finally:
            self.over.set()

    def wait(self) -> None:
        while not self.over.wait(SLICE):
            pass


class Handle:
    """One open ``ckpt *``. CheckpointError carries the library's sentence."""

    def __init__(self, job: str, rank: int, world: int, run_id: Optional[str], directory: Optional[str],
                 socket: Optional[str], daemon: Optional[str], open_timeout: float, busy_timeout: float):
        self._library = load()
        self._pointer = c_void_p()
        self._left: "_Call | None" = None
        options = _sized(
            OpenOptions, rank=rank, world=world, run_id=_text(run_id), directory=_text(directory),
            socket=_text(socket), daemon=_text(daemon), open_timeout_ms=milliseconds(open_timeout),
            busy_timeout_ms=milliseconds(busy_timeout) if busy_timeout > 0 else NO_WAIT,
        )

        lock, given_up = threading.Lock(), False

        def call() -> None:
            opened = c_void_p()
            self._check(self._library.ckpt_open(job.encode(), byref(options), byref(opened)))
            with lock:
                if not given_up:
                    self._pointer = opened
                    return
            self._library.ckpt_close(opened)

        try:
            self._slowly(call)
        except BaseException:
            with lock:
                given_up = True
            self._library.ckpt_close(self._pointer)
            self._pointer = c_void_p()
            raise

    # -- calling --

    def _check(self, result: int, *accepted: int) -> int:
        if result >= 0 or result in accepted:
            return result
        sentence = self._sentence()
        name = (self._library.ckpt_strerror(result) or b"").decode()
        kind = DeadlinePassed if result == E_TIMEOUT else CheckpointError
        raise kind(sentence or name or "libckpt returned %d" % result, result, name)

    def _sentence(self) -> str:
        return (self._library.ckpt_strerror_last() or b"").decode("utf-8", "replace")

    def _warn(self, before: str) -> None:
        """Logs what the library said about a call that succeeded; `before` is the thread's sentence of before."""
        sentence = self._sentence()
        if sentence != before:
            log.warning("%s", sentence)

    def _ready(self) -> c_void_p:
        left = self._left
        if left is not None:
            left.wait()
            self._left = None
        if not self._pointer.value:
            raise ValueError("the checkpointer is closed")
        return self._pointer

    def _slowly(self, function: Callable[[], Any], streams: "Iterable[Optional[int]]" = ()) -> Any:
        """Runs a call that may block; an exception from a signal handler ends only the waiting. Not if the stream of
        each thread is among the `streams` that it names: in another thread that would be another stream."""
        if threading.current_thread() is not threading.main_thread() or STREAM_PER_THREAD in streams:
            return function()
        call = _Call(function)
        self._left = call
        try:
            call.start()
        except RuntimeError:  # no thread could be had: its end will not come
            self._left = None
            raise
        call.wait()
        self._left = None
        if call.error is not None:
            raise call.error
        return call.value

    # -- life --

    @property
    def is_open(self) -> bool:
        return bool(self._pointer.value)

    def close(self) -> None:
        """Closes, which fences. Safe to repeat. If an interrupted call does not end soon, the handle is left to it:
        the service notices the process's end as well."""
        pointer, self._pointer = self._pointer, c_void_p()
        left, self._left = self._left, None
        if not pointer.value:
            return
        if left is not None:
            if not left.over.wait(CLOSE_PATIENCE):
                log.warning("closing: a call that was interrupted still runs, so the service will notice later")
                return
        self._slowly(lambda: self._check(self._library.ckpt_close(pointer)))

    def abandon(self) -> None:
        """Forgets the handle without a call: for the child of a fork, where it belongs to the parent."""
        self._pointer = c_void_p()

    def info(self) -> Info:
        info = _sized(Info)
        self._check(self._library.ckpt_get_info(self._ready(), byref(info)))
        return info

    # -- the registered state --

    def protect(self, name: bytes, dtype: int, address: int, shape: Sequence[int], stride: Optional[Sequence[int]],
                flags: int, box: "Optional[tuple[Sequence[int], Sequence[int]]]", replica: "tuple[int, int]") -> int:
        """`shape` of the global tensor in elements, `stride` in bytes or None, `box` (offset, extent) or None."""
        shard = _sized(
            Shard, dtype=dtype, name=name, data=address, dimensions=len(shape), flags=flags, shape=array_u64(shape),
            replica_index=replica[0], replica_count=replica[1],
        )
        if box is not None:
            shard.offset, shard.extent = array_u64(box[0]), array_u64(box[1])
        if stride is not None:
            shard.stride = array_i64(stride)
        identity = c_uint64()
        self._check(self._library.ckpt_protect(self._ready(), byref(shard), byref(identity)))
        return identity.value

    def alias(self, alias: bytes, name: bytes) -> None:
        self._check(self._library.ckpt_alias(self._ready(), alias, name))

    def unprotect(self, identity: int) -> None:
        self._check(self._library.ckpt_unprotect(self._ready(), identity), E_TIMEOUT, E_LOST)

    def unprotect_all(self) -> None:
        self._check(self._library.ckpt_unprotect_all(self._ready()), E_TIMEOUT, E_LOST)

    # -- device memory --

    def quiet(self, begin: bool) -> None:
        self._check(self._library.ckpt_quiet(self._ready(), int(begin)))

    def release_imports(self) -> None:
        pointer = self._ready()
        self._slowly(lambda: self._check(self._library.ckpt_release_imports(pointer), E_TIMEOUT, E_LOST))

    def device_usage(self) -> DeviceUsage:
        usage, pointer = _sized(DeviceUsage), self._ready()
        self._slowly(lambda: self._check(self._library.ckpt_device_usage(pointer, byref(usage))))
        return usage

    # -- saving --

    def save(self, step: int, state: bytes, to: int, urgent: bool, check: bool, slowly: bool,
             streams: "Sequence[int]" = ()) -> int:
        """OK, SKIPPED or ALREADY. `slowly`: it may block for more than a moment. `streams`: device memory is read
        behind them."""
        options = _sized(SaveOptions, to=to, state_size=len(state), urgent=urgent, check=check)
        if state:
            options.state = ctypes.cast(state, c_void_p)
        if streams:
            options.streams, options.stream_count = (c_void_p * len(streams))(*streams), len(streams)
        pointer = self._ready()

        def call() -> int:
            return self._check(self._library.ckpt_save(pointer, step, byref(options)))

        if slowly:
            return self._slowly(call, streams)
        before = self._sentence()
        result = call()
        self._warn(before)
        return result

    def fence(self, step: int, timeout: float) -> None:
        """Waits for the capture of `step`, the last save. Not in slices: the library's fence revokes the capture at
        its deadline. Mostly it has ended, which the library knows without asking: then no thread is needed."""
        pointer = self._ready()

        def call() -> int:
            return self._check(self._library.ckpt_fence(pointer, milliseconds(timeout)))

        if self._library.ckpt_test(pointer, step, CAPTURED, PART) == OK:
            call()
        else:
            self._slowly(call)

    def wait(self, step: int, level: int, scope: int, timeout: float) -> int:
        """OK or SKIPPED (it never will be); DeadlinePassed."""
        pointer = self._ready()
        end = time.monotonic() + timeout
        while True:
            left = end - time.monotonic()
            result = self._library.ckpt_wait(pointer, step, level, scope, milliseconds(max(0.001, min(SLICE, left))))
            if result != E_TIMEOUT or left <= SLICE:
                return self._check(result)

    def last_durable(self, level: int) -> Optional[Durable]:
        durable = _sized(Durable)
        result = self._check(self._library.ckpt_last_durable(self._ready(), level, byref(durable)))
        return None if result == NONE else durable

    def versions(self) -> "list[VersionEntry]":
        entries, count = POINTER(VersionEntry)(), c_size_t()
        pointer = self._ready()
        self._slowly(lambda: self._check(self._library.ckpt_versions(pointer, byref(entries), byref(count))))
        copies = [VersionEntry.from_buffer_copy(entries[position]) for position in range(count.value)]
        self._library.ckpt_versions_free(entries)
        return copies

    def restore(self, which: int, generation: int, step: int, timeout: float) -> "Optional[Restore]":
        """The opened version, or None if the job has none."""
        options = _sized(RestoreOptions, which=which, generation=generation, step=step, timeout_ms=milliseconds(timeout))
        pointer, opened = self._ready(), c_void_p()

        def call() -> int:
            before = self._sentence()
            result = self._check(self._library.ckpt_restore_open(pointer, byref(options), byref(opened)))
            self._warn(before)
            return result

        return None if self._slowly(call) == NONE else Restore(self, opened)


class Restore:
    """One open ``ckpt_restore *``; closed by `close` or at the end of a ``with``."""

    def __init__(self, handle: Handle, pointer: c_void_p):
        self._handle = handle
        self._library = handle._library
        self._pointer = pointer

    def __enter__(self) -> "Restore":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        if self._pointer.value:
            self._handle._ready()
            pointer, self._pointer = self._pointer, c_void_p()
            self._library.ckpt_restore_close(pointer)

    def info(self) -> RestoreInfo:
        info = _sized(RestoreInfo)
        self._handle._check(self._library.ckpt_restore_get_info(self._pointer, byref(info)))
        return info

    def tensors(self, count: int) -> "list[tuple[str, int, tuple[int, ...], int, int]]":
        """(name, dtype, shape, flags, rank) of every stored tensor, aliases included."""
        entry = _sized(TensorEntry)
        reference = byref(entry)
        result = []
        for position in range(count):
            self._handle._check(self._library.ckpt_restore_tensor(self._pointer, position, reference))
            shape = tuple(entry.shape[: entry.dimensions])
            result.append((entry.name.decode(), entry.dtype, shape, entry.flags, entry.rank))
        return result

    def state(self, rank: int) -> bytes:
        """A copy of the inline state that `rank` gave."""
        data, size = c_void_p(), c_uint64()

        def call() -> int:
            return self._handle._check(self._library.ckpt_restore_state(self._pointer, rank, byref(data), byref(size)))

        self._handle._slowly(call)
        return ctypes.string_at(data, size.value) if size.value else b""

    def read_many(self, reads: "list[Read]") -> None:
        array = (Read * len(reads))(*reads)

        def call() -> int:
            return self._handle._check(self._library.ckpt_restore_read_many(self._pointer, array, len(reads)))

        self._handle._slowly(call, (read.stream for read in reads if read.on_stream))
