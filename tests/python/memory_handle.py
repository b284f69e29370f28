# SPDX-License-Identifier: Apache-2.0
"""A stand-in for `ckptd.binding.Handle` that keeps versions in this process: for tests without a daemon.

It is as strict as the library where it matters: eager shards are read inside save, fenced ones only at the fence.
"""
import contextlib
import ctypes
import itertools
from unittest import mock

from ckptd import arrays, binding


def positions(shape, stride):
    for index in itertools.product(*map(range, shape)):
        yield sum(step * place for step, place in zip(stride, index))


def pack(address, shape, stride, size):
    return b"".join(ctypes.string_at(address + offset, size) for offset in positions(shape, stride))


class Store:
    """What survives the handles: a list of versions."""

    def __init__(self):
        self.versions = []


class MemoryHandle:
    def __init__(self, store, rank, world):
        self.store, self.rank, self.world = store, rank, world
        self.shards, self.aliases = {}, {}
        self.calls = []
        self.next = 1
        self.running = None
        self.is_open = True
        self.failure = None

    def close(self):
        if self.running is not None:
            self.fence(1)
        self.is_open = False

    def abandon(self):
        self.is_open = False

    def info(self):
        return binding.Info(rank=self.rank, world=self.world, connected=1, levels=1 << binding.LOCAL)

    def protect(self, name, dtype, address, shape, stride, flags, box, replica):
        self.calls.append(("protect", name.decode()))
        key = name.decode()
        assert not any(shard["name"] == key for shard in self.shards.values()), key
        extent = shape if box is None else box[1]
        size = binding.DTYPE_SIZES[dtype]
        self.shards[self.next] = {
            "name": key, "dtype": dtype, "address": address, "shape": tuple(shape), "extent": tuple(extent),
            "stride": stride if stride is not None else arrays.row_major(extent, size), "flags": flags, "size": size,
            "replica": replica, "box": box,
        }
        self.next += 1
        return self.next - 1

    def alias(self, alias, name):
        self.aliases[alias.decode()] = name.decode()

    def unprotect(self, identity):
        self.calls.append(("unprotect", self.shards.pop(identity)["name"]))

    def unprotect_all(self):
        self.calls.append(("unprotect_all",))
        self.shards, self.aliases = {}, {}

    def _take(self, eager):
        for shard in self.shards.values():
            if bool(shard["flags"] & binding.EAGER) == eager:
                data = pack(shard["address"], shard["extent"], shard["stride"], shard["size"])
                self.running["tensors"][shard["name"]] = (shard["dtype"], shard["shape"], shard["flags"], data)

    def save(self, step, state, to, urgent, check, slowly, streams=()):
        if self.failure is not None:
            raise self.failure
        if self.store.versions and self.store.versions[-1]["step"] == step:
            return binding.ALREADY
        self.running = {"step": step, "state": state, "tensors": {}, "world": self.world}
        self._take(True)
        return binding.OK

    def fence(self, step, timeout):
        self._take(False)
        for alias, target in self.aliases.items():
            self.running["tensors"][alias] = self.running["tensors"][target]
        self.store.versions.append(self.running)
        self.running = None

    def wait(self, step, level, scope, timeout):
        return binding.OK

    def last_durable(self, level):
        return None

    def restore(self, which, generation, step, timeout):
        if not self.store.versions:
            return None
        if which == binding.RESTORE_LATEST:
            return MemoryRestore(self.store.versions[-1])
        return MemoryRestore(next(each for each in self.store.versions if each["step"] == step))


class MemoryRestore:
    def __init__(self, version):
        self.version = version
        self.reads = 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def info(self):
        return binding.RestoreInfo(
            world=self.version["world"], step=self.version["step"], tensors=len(self.version["tensors"])
        )

    def tensors(self, count):
        return [
            (name, dtype, shape, flags & binding.RANK_LOCAL, 0)
            for name, (dtype, shape, flags, _) in sorted(self.version["tensors"].items())
        ]

    def state(self, rank):
        return self.version["state"]

    def read_many(self, reads):
        for read in reads:
            dtype, shape, _, data = self.version["tensors"][read.name.decode()]
            size = binding.DTYPE_SIZES[dtype]
            assert dtype == read.dtype and tuple(read.shape[: read.dimensions]) == shape
            assert not read.offset, "the stand-in reads whole tensors only"
            stride = read.stride[: read.dimensions] if read.stride else arrays.row_major(shape, size)
            for position, offset in enumerate(positions(shape, stride)):
                ctypes.memmove(read.data + offset, data[position * size : (position + 1) * size], size)


@contextlib.contextmanager
def without_daemon(store):
    """Inside, every new Checkpointer works on `store`."""

    def opened(job, rank, world, *rest):
        return MemoryHandle(store, rank, world)

    with mock.patch("ckptd.checkpointer.Handle", opened):
        yield store
