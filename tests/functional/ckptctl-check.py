# SPDX-License-Identifier: Apache-2.0
"""Checks an exported file against what ckptctl-make put into its versions.

usage: ckptctl-check.py FILE STEP KIND KEY...   the keys that must be there, no others
KIND is merged, model or part. A minimal safetensors reader of its own, which is strict: no holes,
no overlaps, no bytes left over."""
import array
import json
import struct
import sys

SIZES = {"U8": 1, "U16": 2, "I32": 4, "F32": 4, "F64": 8, "I64": 8}
CODES = {"U8": "B", "U16": "H", "I32": "i", "F32": "f", "F64": "d", "I64": "q"}


def read(path):
    with open(path, "rb") as file:
        data = file.read()
    (length,) = struct.unpack_from("<Q", data)
    assert length <= 100_000_000 and (8 + length) % 4096 == 0
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    assert all(isinstance(value, str) for value in metadata.values()), metadata
    tensors, end = {}, 0
    for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = entry["data_offsets"]
        count = 1
        for extent in entry["shape"]:
            count *= extent
        assert begin == end, f"{key}: a hole or an overlap"
        assert stop - begin == count * SIZES[entry["dtype"]], key
        assert (8 + length + begin) % SIZES[entry["dtype"]] == 0, f"{key} is not aligned"
        tensors[key] = (entry["dtype"], entry["shape"], data[8 + length + begin : 8 + length + stop])
        end = stop
    assert 8 + length + end == len(data), "bytes left over"
    return metadata, tensors


def check(key, dtype, shape, data, step):
    name = key.split("@")[0]
    if name.endswith("%state"):
        assert data.decode().startswith("state of rank "), data
        assert data.decode().endswith(f" at {step}"), data
        return
    if name.endswith("phase"):
        assert (dtype, shape) == ("U8", [5, 8])
        assert list(struct.unpack("<10f", data)) == [v for i in range(5) for v in (float(i + step), -float(i + step))]
        return
    values = array.array(CODES[dtype])
    values.frombytes(data)
    bits = {"U8": 8, "U16": 16}.get(dtype, 64)
    assert list(values) == [(i + step) % (1 << bits) for i in range(len(values))], f"{key} has wrong values"


def main(path, step, kind, *keys):
    metadata, tensors = read(path)
    assert sorted(tensors) == sorted(keys), f"{sorted(tensors)} instead of {sorted(keys)}"
    if kind == "model":
        assert metadata["format"] == "pt" and "job" not in metadata, metadata
    else:
        assert metadata["job"] == "job"
    if kind == "part":
        return
    for key, (dtype, shape, data) in tensors.items():
        check(key, dtype, shape, data, int(step))
    if "phase" in tensors:
        assert json.loads(metadata["ckptd.tensors"])["phase"]["dtype"] == "C64"
    shapes = {"rows": [64, 3000], "tied": [64, 3000], "columns": [17, 50], "flat": [301, 333], "scalar": [], "big": [400000]}
    for key, (dtype, shape, data) in tensors.items():
        assert shapes.get(key.split("/")[-1], shape) == shape, (key, shape)


main(*sys.argv[1:])
