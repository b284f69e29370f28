# SPDX-License-Identifier: Apache-2.0
"""Typed JSON: Python values as JSON text, and back with their types.

What JSON has (None, bool, int, finite float, str, list, dict with str keys) stands as itself. Everything
else is an object with the key ``$`` that names the type, e.g. ``{"$": "tuple", "v": [1, 2]}``; a dict that
has the key ``$`` itself is written as pairs, so nothing is ambiguous. The text is ASCII.

Decoding builds only the types of the table in this file: nothing is imported and nothing is unpickled, except
``{"$": "pickle"}`` entries, which exist only if the writer allowed them and are refused unless the reader
does. Enumerations are looked up among the modules that are already imported.

Tensors and arrays are not this module's business: `encode` gives each value first to `leaf`, which may
answer with JSON of its own; `decode` hands objects with an unknown ``$`` to `leaf`.
"""
from __future__ import annotations

import base64
import collections
import datetime
import decimal
import enum
import fractions
import json
import math
import pathlib
import pickle
import struct
import sys
import uuid
from typing import Any, Callable, Optional

from . import names

_FACTORIES = {kind.__name__: kind for kind in (int, float, complex, str, bytes, bool, list, tuple, dict, set)}

#: The answer of `leaf` for "not mine".
NOT_A_LEAF = object()

EncodeLeaf = Callable[[Any, str], Any]
DecodeLeaf = Callable[[dict, str], Any]


def dumps(value: Any) -> str:
    """The compact text of a value without leaves."""
    return to_text(encode(value, ""))


def loads(text: "str | bytes", allow_pickle: bool = False) -> Any:
    """The value of a text made by `dumps`."""
    return decode(json.loads(text), "", allow_pickle=allow_pickle)


def to_text(encoded: Any) -> str:
    return json.dumps(encoded, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _float(value: float) -> Any:
    if math.isfinite(value):
        return value
    bits = struct.pack(">d", value)
    for text in ("nan", "inf", "-inf"):
        if struct.pack(">d", float(text)) == bits:
            return {"$": "float", "v": text}
    return {"$": "float", "bits": bits.hex()}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else "%s.%s" % (kind.__module__, kind.__qualname__)


class _Encoder:
    def __init__(self, leaf: Optional[EncodeLeaf], allow_pickle: bool):
        self.leaf = leaf
        self.allow_pickle = allow_pickle
        self.open: "set[int]" = set()

    def encode(self, value: Any, name: str) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -(1 << 63) <= value < 1 << 64 else {"$": "int", "v": hex(value)}
        if kind is float:
            return _float(value)
        if self.leaf is not None:
            found = self.leaf(value, name)
            if found is not NOT_A_LEAF:
                return found
        container = _CONTAINERS.get(kind)
        if container is not None:
            if id(value) in self.open:
                raise TypeError("%s: the container contains itself; a checkpoint needs a tree" % name)
            self.open.add(id(value))
            try:
                return container(self, value, name)
            finally:
                self.open.discard(id(value))
        scalar = _SCALARS.get(kind)
        if scalar is not None:
            return {"$": scalar[0], "v": scalar[1](value)}
        return self.other(value, name)

    def other(self, value: Any, name: str) -> Any:
        if isinstance(value, enum.Enum):
            kind = type(value)
            return {"$": "enum", "type": "%s:%s" % (kind.__module__, kind.__qualname__), "v": value.name}
        if isinstance(value, pathlib.PurePath):
            return {"$": "path", "v": str(value)}
        module = type(value).__module__.partition(".")[0]
        if module == "numpy":
            found = _encode_numpy(value)
        elif module == "torch":
            found = _encode_torch(value)
        else:
            found = None
        if found is not None:
            return found
        if self.allow_pickle:
            try:
                return {"$": "pickle", "v": _base64(pickle.dumps(value))}
            except Exception as error:
                raise TypeError("%s: a %s cannot be pickled: %s" % (name, _type_name(value), error)) from error
        raise TypeError(
            "%s: a %s cannot be stored; give it as plain data (numbers, strings, lists, dicts, tensors), leave it "
            "out, or pass allow_pickle=True" % (name, _type_name(value))
        )

    def sequence(self, value: Any, name: str) -> "list[Any]":
        return [self.encode(item, "%s/%d" % (name, position)) for position, item in enumerate(value)]

    def pairs(self, value: Any, name: str) -> "list[Any]":
        return [
            [_encode_key(key, name), self.encode(item, names.join(name, key))] for key, item in value.items()
        ]

    def dict(self, value: dict, name: str) -> Any:
        if all(type(key) is str for key in value) and "$" not in value:
            return {key: self.encode(item, name + "/" + names.escape(key)) for key, item in value.items()}
        return {"$": "dict", "v": self.pairs(value, name)}

    def defaultdict(self, value: Any, name: str) -> Any:
        factory = value.default_factory
        if factory is not None and _FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
            raise TypeError(
                "%s: a defaultdict made with %r cannot be stored; use a builtin type as its factory, or a dict"
                % (name, factory)
            )
        return {"$": "defaultdict", "factory": factory and factory.__name__, "v": self.pairs(value, name)}

    def set(self, value: Any, name: str) -> Any:
        return {"$": type(value).__name__, "v": sorted((_encode_key(item, name) for item in value), key=to_text)}


def _encode_key(key: Any, name: str) -> Any:
    try:
        return _Encoder(None, False).encode(key, "")
    except TypeError:
        raise TypeError("%s: a key or set member of type %s cannot be stored" % (name, _type_name(key))) from None


_CONTAINERS: "dict[type, Callable[[_Encoder, Any, str], Any]]" = {
    list: _Encoder.sequence,
    dict: _Encoder.dict,
    tuple: lambda encoder, value, name: {"$": "tuple", "v": encoder.sequence(value, name)},
    set: _Encoder.set,
    frozenset: _Encoder.set,
    collections.OrderedDict: lambda encoder, value, name: {"$": "OrderedDict", "v": encoder.pairs(value, name)},
    collections.Counter: lambda encoder, value, name: {"$": "Counter", "v": encoder.pairs(value, name)},
    collections.defaultdict: _Encoder.defaultdict,
    collections.deque: lambda encoder, value, name: {
        "$": "deque", "maxlen": value.maxlen, "v": encoder.sequence(value, name)
    },
}


def _encode_datetime(value: "datetime.datetime | datetime.time") -> Any:
    if value.tzinfo is not None and type(value.tzinfo) is not datetime.timezone:
        raise TypeError("a %s with tzinfo %r cannot be stored; use datetime.timezone" % (_type_name(value), value.tzinfo))
    return [value.isoformat(), value.fold]


_SCALARS: "dict[type, tuple[str, Callable[[Any], Any]]]" = {
    complex: ("complex", lambda value: [_float(value.real), _float(value.imag)]),
    bytes: ("bytes", _base64),
    range: ("range", lambda value: [value.start, value.stop, value.step]),
    slice: ("slice", lambda value: [dumps(value.start), dumps(value.stop), dumps(value.step)]),
    type(Ellipsis): ("ellipsis", lambda value: None),
    datetime.datetime: ("datetime", _encode_datetime),
    datetime.date: ("date", datetime.date.isoformat),
    datetime.time: ("time", _encode_datetime),
    datetime.timedelta: ("timedelta", lambda value: [value.days, value.seconds, value.microseconds]),
    decimal.Decimal: ("decimal", str),
    fractions.Fraction: ("fraction", lambda value: [value.numerator, value.denominator]),
    uuid.UUID: ("uuid", str),
}


def _encode_numpy(value: Any) -> Any:
    import numpy

    if isinstance(value, numpy.generic) and value.dtype.kind in "biufcmMSU":
        return {"$": "numpy", "dtype": value.dtype.str, "v": _base64(value.tobytes())}
    if isinstance(value, numpy.dtype) and value.kind in "biufcmMSU":
        return {"$": "numpy.dtype", "v": value.str}
    return None


def _encode_torch(value: Any) -> Any:
    import torch

    if type(value) is torch.Size:
        return {"$": "torch.Size", "v": list(value)}
    if isinstance(value, torch.device):
        return {"$": "torch.device", "v": str(value)}
    for kind in (torch.dtype, torch.layout, torch.memory_format):
        if isinstance(value, kind):
            return {"$": "torch", "v": str(value).partition(".")[2]}
    return None


def encode(value: Any, name: str, leaf: Optional[EncodeLeaf] = None, allow_pickle: bool = False) -> Any:
    """JSON data for `value`. `name` is the value's own (for messages and leaves). TypeError names the path."""
    try:
        return _Encoder(leaf, allow_pickle).encode(value, name)
    except RecursionError:
        raise TypeError("%s: nested too deeply to be stored" % name) from None


class _Decoder:
    def __init__(self, leaf: Optional[DecodeLeaf], allow_pickle: bool):
        self.leaf = leaf
        self.allow_pickle = allow_pickle

    def decode(self, data: Any, name: str) -> Any:
        if type(data) is list:
            return self.sequence(data, name)
        if type(data) is not dict:
            return data
        kind = data.get("$")
        if kind is None:
            return {key: self.decode(item, name + "/" + names.escape(key)) for key, item in data.items()}
        if kind in _DECODE_CONTAINERS:
            return _DECODE_CONTAINERS[kind](self, data, name)
        try:
            if kind in _DECODE_SCALARS:
                return _DECODE_SCALARS[kind](data)
        except (KeyError, ValueError, TypeError, AttributeError, ImportError) as error:
            raise ValueError("%s: a stored %s cannot be read here: %s" % (name, kind, error)) from error
        if kind == "pickle":
            if not self.allow_pickle:
                raise ValueError("%s: stored by pickle; pass allow_pickle=True if you trust who wrote it" % name)
            return pickle.loads(base64.b64decode(data["v"]))
        if self.leaf is not None:
            return self.leaf(data, name)
        raise ValueError("%s: unknown stored type %r; written by a newer version?" % (name, kind))

    def sequence(self, data: "list[Any]", name: str) -> "list[Any]":
        return [self.decode(item, "%s/%d" % (name, position)) for position, item in enumerate(data)]

    def pairs(self, data: "list[Any]", name: str) -> "list[tuple[Any, Any]]":
        result = []
        for encoded_key, item in data:
            key = _Decoder(None, False).decode(encoded_key, name)
            result.append((key, self.decode(item, names.join(name, key))))
        return result


_DECODE_CONTAINERS: "dict[str, Callable[[_Decoder, dict, str], Any]]" = {
    "tuple": lambda decoder, data, name: tuple(decoder.sequence(data["v"], name)),
    "set": lambda decoder, data, name: set(decoder.sequence(data["v"], name)),
    "frozenset": lambda decoder, data, name: frozenset(decoder.sequence(data["v"], name)),
    "dict": lambda decoder, data, name: dict(decoder.pairs(data["v"], name)),
    "OrderedDict": lambda decoder, data, name: collections.OrderedDict(decoder.pairs(data["v"], name)),
    "Counter": lambda decoder, data, name: collections.Counter(dict(decoder.pairs(data["v"], name))),
    "defaultdict": lambda decoder, data, name: collections.defaultdict(
        _FACTORIES[data["factory"]] if data["factory"] else None, decoder.pairs(data["v"], name)
    ),
    "deque": lambda decoder, data, name: collections.deque(decoder.sequence(data["v"], name), data["maxlen"]),
}


def _decode_float(data: Any) -> float:
    if type(data) is dict:
        return struct.unpack(">d", bytes.fromhex(data["bits"]))[0] if "bits" in data else float(data["v"])
    return data


def _decode_enum(data: dict) -> Any:
    module, _, path = data["type"].partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, enum.Enum)):
        raise ValueError("the enumeration %s is not imported" % data["type"])
    return found[data["v"]]


def _decode_numpy(data: dict) -> Any:
    import numpy

    return numpy.frombuffer(base64.b64decode(data["v"]), dtype=numpy.dtype(data["dtype"]))[0]


def _decode_numpy_dtype(data: dict) -> Any:
    import numpy

    return numpy.dtype(data["v"])


def _decode_torch(data: dict) -> Any:
    import torch

    value = getattr(torch, data["v"])
    if not isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        raise ValueError("torch.%s is no dtype, layout or memory format" % data["v"])
    return value


def _decode_torch_size(data: dict) -> Any:
    import torch

    return torch.Size(data["v"])


def _decode_torch_device(data: dict) -> Any:
    import torch

    return torch.device(data["v"])


_DECODE_SCALARS: "dict[str, Callable[[dict], Any]]" = {
    "float": _decode_float,
    "int": lambda data: int(data["v"], 16),
    "complex": lambda data: complex(_decode_float(data["v"][0]), _decode_float(data["v"][1])),
    "bytes": lambda data: base64.b64decode(data["v"]),
    "range": lambda data: range(*data["v"]),
    "slice": lambda data: slice(*(loads(part) for part in data["v"])),
    "ellipsis": lambda data: Ellipsis,
    "datetime": lambda data: datetime.datetime.fromisoformat(data["v"][0]).replace(fold=data["v"][1]),
    "date": lambda data: datetime.date.fromisoformat(data["v"]),
    "time": lambda data: datetime.time.fromisoformat(data["v"][0]).replace(fold=data["v"][1]),
    "timedelta": lambda data: datetime.timedelta(*data["v"]),
    "decimal": lambda data: decimal.Decimal(data["v"]),
    "fraction": lambda data: fractions.Fraction(*data["v"]),
    "uuid": lambda data: uuid.UUID(data["v"]),
    "path": lambda data: pathlib.Path(data["v"]),
    "enum": _decode_enum,
    "numpy": _decode_numpy,
    "numpy.dtype": _decode_numpy_dtype,
    "torch": _decode_torch,
    "torch.Size": _decode_torch_size,
    "torch.device": _decode_torch_device,
}


def decode(data: Any, name: str, leaf: Optional[DecodeLeaf] = None, allow_pickle: bool = False) -> Any:
    """The value of `encode`'s JSON data. ValueError names the path of what cannot be built here."""
    return _Decoder(leaf, allow_pickle).decode(data, name)
