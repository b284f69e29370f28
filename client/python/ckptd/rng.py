# SPDX-License-Identifier: Apache-2.0
"""The state of the random number generators: Python's, numpy's legacy one, torch's on the CPU and on CUDA devices.

Only those in use: numpy and torch if they are imported, CUDA if it is initialised. Small enough for the inline state.
"""
from __future__ import annotations

import array
import random
import sys
from typing import Any


def take() -> "dict[str, Any]":
    """All states, as plain data for `ckptd.typed`."""
    version, words, gauss = random.getstate()
    state: "dict[str, Any]" = {"python": (version, array.array("Q", words).tobytes(), gauss)}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        name, key, position, has_gauss, cached = numpy.random.get_state()
        if name == "MT19937":
            state["numpy"] = (key.tobytes(), int(position), int(has_gauss), float(cached))
    if torch is not None:
        state["torch"] = _tensor_bytes(torch.get_rng_state())
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = [_tensor_bytes(each) for each in torch.cuda.get_rng_state_all()]
    return state


def put(state: "dict[str, Any]") -> None:
    """Sets the generators that are stored and in use here; the others are left alone."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if "python" in state:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(array.array("Q", words)), gauss))
    if "numpy" in state and numpy is not None:
        key, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state(("MT19937", numpy.frombuffer(key, dtype=numpy.uint32), position, has_gauss, cached))
    if "torch" in state and torch is not None:
        torch.set_rng_state(_bytes_tensor(state["torch"]))
        if "cuda" in state and torch.cuda.is_available() and torch.cuda.device_count() == len(state["cuda"]):
            torch.cuda.set_rng_state_all([_bytes_tensor(each) for each in state["cuda"]])


def _tensor_bytes(tensor: Any) -> bytes:
    import ctypes

    return ctypes.string_at(tensor.data_ptr(), tensor.numel())


def _bytes_tensor(data: bytes) -> Any:
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()
