# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver, the stand-in's here, for programs in Python."""
import ctypes


class Driver:
    """A few calls of libcuda.so.1; device 0's primary context is current."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        self.context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)
        self.call("cuCtxSetCurrent", self.context)

    def call(self, name, *arguments):
        result = getattr(self.library, name)(*arguments)
        if result:
            raise RuntimeError("%s: CUDA error %d" % (name, result))

    def end(self):
        self.call("cuDevicePrimaryCtxRelease_v2", 0)
