# SPDX-License-Identifier: Apache-2.0
"""Reads the file that room.c wrote, by what the safetensors format says and nothing else.

usage: safetensors-check.py FILE"""
import json
import struct
import sys

SIZES = {"U8": 1, "F32": 4, "U64": 8}

with open(sys.argv[1], "rb") as file:
    data = file.read()
(length,) = struct.unpack_from("<Q", data)
header = json.loads(data[8 : 8 + length])
body = data[8 + length :]
metadata = header.pop("__metadata__")
assert all(isinstance(key, str) and isinstance(value, str) for key, value in metadata.items()), metadata

end = 0
for name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
    begin, after = tensor["data_offsets"]
    count = 1
    for extent in tensor["shape"]:
        count *= extent
    assert begin == end, f"{name} leaves a hole"
    assert after - begin == count * SIZES[tensor["dtype"]], name
    end = after
assert end == len(body), "bytes behind the last tensor"

begin, after = header["layer/0 weight"]["data_offsets"]
first = (2 * 0x9E3779B97F4A7C15) % 2**64
assert list(struct.unpack(f"<{(after - begin) // 8}Q", body[begin:after])) == [(first + i) % 2**64 for i in range(1000)]
begin, after = header["halves"]["data_offsets"]
assert struct.unpack("<7f", body[begin:after]) == tuple(i + 0.5 for i in range(7))
assert body.endswith(b"step one")
