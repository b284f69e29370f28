#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_version.py WRITE_VERSION SOURCE_DIRECTORY: has write-version make a version, raw and LZ4, and
reads it by means that share no code with it: a parser of safetensors as its documentation describes
the format, the package of that name where it is installed, and proto/read_checkpoint.py, which must
be the one that proto/FORMAT.md shows. And whether proto/PROTOCOL.md has the table of messages."""
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile

SIZES = {'BOOL': 1, 'U8': 1, 'I8': 1, 'F8_E5M2': 1, 'F8_E4M3': 1, 'I16': 2, 'U16': 2, 'F16': 2, 'BF16': 2, 'I32': 4,
         'U32': 4, 'F32': 4, 'I64': 8, 'U64': 8, 'F64': 8, 'C64': 8, 'C128': 16}
STORED = {'C64': 'U8', 'C128': 'U8'}
STATE = b'{"step": 1200, "loader": "\\u00e9"}'
ODD = 'a@b%40c/"quoted"\\\n\u00e9\U0001f600'


def element(name, number, dtype):
    total = sum(name.encode())
    return bytes((number * 31 + j * 7 + total) & (1 if dtype == 'BOOL' else 255) for j in range(SIZES[dtype]))


def count(shape):
    total = 1
    for extent in shape:
        total *= extent
    return total


def box(name, dtype, shape, offset, extent):
    """The bytes of a box, element by element."""
    data = bytearray()
    for index in itertools.product(*(range(o, o + e) for o, e in zip(offset, extent))):
        number = 0
        for i, size in zip(index, shape):
            number = number * size + i
        data += element(name, number, dtype)
    return bytes(data)


def flat(name, dtype, start, length):
    return b''.join(element(name, number, dtype) for number in range(start, start + length))


def expected(rank):
    """{key: (stored dtype, stored shape, bytes)} of one part."""
    tensors = {}

    def add(key, name, dtype, shape, data):
        stored = STORED.get(dtype, dtype)
        tensors[key] = stored, list(shape) + ([SIZES[dtype]] if stored != dtype else []), data

    for code, dtype in enumerate(SIZES, 1):
        if code % 2 == rank:
            name = f'all.{dtype}'
            add(name, name, dtype, [3, code], flat(name, dtype, 0, 3 * code))
    at = rank * 100
    add(f'columns@0+300,{at}+100', 'columns', 'F32', [300, 100],
        box('columns', 'F32', [300, 200], [0, at], [300, 100]))
    for i in range(2):
        column = (rank + i) % 2 * 3
        add(f'grid@{i * 5}+5,0+4,{column}+3', 'grid', 'I16', [5, 4, 3],
            box('grid', 'I16', [10, 4, 6], [i * 5, 0, column], [5, 4, 3]))
    length = [100, 131][rank]
    add(f'flat@r{at}+{length}', 'flat', 'F64', [length], flat('flat', 'F64', at, length))
    start, length = [(0, 4), (4, 5)][rank]
    add(f'complex@{start}+{length}', 'complex', 'C64', [length], flat('complex', 'C64', start, length))
    add('%rank/rng', 'rng', 'U64', [5 + rank], flat('rng', 'U64', 0, 5 + rank))
    add('%state', None, 'U8', [len(STATE)], STATE)
    if rank == 0:
        add('scalar', 'scalar', 'F32', [], flat('scalar', 'F32', 0, 1))
        add('empty', 'empty', 'F32', [0], b'')
        add('whole range', 'whole range', 'I32', [5, 7], flat('whole range', 'I32', 0, 35))
        add('%5F_metadata__', '__metadata__', 'I8', [3], flat('__metadata__', 'I8', 0, 3))
        add('%25state', '%state', 'I8', [4], flat('%state', 'I8', 0, 4))
        add('a%40b%2540c/"quoted"\\\n\u00e9\U0001f600', ODD, 'I8', [5], flat(ODD, 'I8', 0, 5))
    return tensors


def check_safetensors(path, rank):
    """What the format's documentation demands, and what we add: page-aligned data, aligned tensors."""
    with open(path, 'rb') as file:
        data = file.read()
    length = int.from_bytes(data[:8], 'little')
    assert data[8:9] == b'{' and (8 + length) % 4096 == 0 and length <= 100_000_000
    pairs = json.loads(data[8:8 + length], object_pairs_hook=list)
    assert pairs[0][0] == '__metadata__', 'the metadata come first'
    assert len(dict(pairs)) == len(pairs), 'a key twice'
    metadata = dict(pairs[0][1])
    assert all(isinstance(value, str) for value in metadata.values())
    assert (metadata['format'], metadata['ckptd'], metadata['job']) == ('pt', '1', 'interchange')
    assert (metadata['rank'], metadata['world'], metadata['ckptd.state']) == (str(rank), '2', '%state')
    tensors, end = {}, 0
    for key, entry in pairs[1:]:
        entry = dict(entry)
        first, last = entry['data_offsets']
        assert first == end and last - first == count(entry['shape']) * SIZES[entry['dtype']], key
        assert first % SIZES[entry['dtype']] == 0, f'{key} is not aligned'
        tensors[key] = entry['dtype'], entry['shape'], data[8 + length + first:8 + length + last]
        end = last
    assert 8 + length + end == len(data), 'bytes that belong to no tensor'
    assert tensors == expected(rank)
    explained = json.loads(metadata['ckptd.tensors'])
    assert explained['tied'] == {'name': 'tied', 'dtype': 'I16', 'shape': [10, 4, 6], 'alias': 'grid'}
    assert explained['%rank/rng']['local'] is True
    start = rank * 100
    assert explained[f'columns@0+300,{start}+100'] == {
        'name': 'columns', 'dtype': 'F32', 'shape': [300, 200], 'box': [[0, start], [300, 100]]}
    assert all(explained[key]['name'] for key in explained)


def check_package(path, rank):
    try:
        from safetensors import deserialize, safe_open
    except ImportError:
        print('SKIPPED: the package safetensors is not installed')
        return
    with open(path, 'rb') as file:
        read = dict(deserialize(file.read()))
    assert {key: (value['dtype'], value['shape'], bytes(value['data'])) for key, value in read.items()} == expected(rank)
    with safe_open(path, framework='numpy') as opened:
        assert opened.metadata()['ckptd'] == '1'
        assert opened.get_tensor('%rank/rng').tobytes() == expected(rank)['%rank/rng'][2]
    print('the package safetensors reads the same')


def check_reader(source, directory, codec):
    try:
        import numpy
        import xxhash
        assert numpy and xxhash
        if codec == 'lz4':
            import lz4.block
            assert lz4.block
    except ImportError as error:
        print(f'SKIPPED: read_checkpoint.py on {codec}: {error}')
        return
    spec = importlib.util.spec_from_file_location('read_checkpoint', os.path.join(source, 'proto/read_checkpoint.py'))
    reader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reader)
    version = reader.Version(directory)
    version.verify()
    whole = {f'all.{dtype}': (dtype, [3, code]) for code, dtype in enumerate(SIZES, 1)}
    whole.update({'columns': ('F32', [300, 200]), 'grid': ('I16', [10, 4, 6]), 'flat': ('F64', [77, 3]),
                  'complex': ('C64', [9]), 'scalar': ('F32', []), 'empty': ('F32', [0]), 'whole range': ('I32', [5, 7]),
                  '__metadata__': ('I8', [3]), '%state': ('I8', [4]), ODD: ('I8', [5])})
    for name, (dtype, shape) in whole.items():
        array = version.read(name)
        assert list(array.shape) == shape and array.tobytes() == flat(name, dtype, 0, count(shape)), name
    assert version.read('tied').tobytes() == version.read('grid').tobytes()
    for rank in range(2):
        assert version.read('rng', rank).tobytes() == flat('rng', 'U64', 0, 5 + rank)
        assert version.part(rank).state() == STATE
    assert {piece['name'] for piece in version.pieces} == set(whole) | {'tied', 'rng'}
    assert version.head['tensors'] == len(whole) + 1

    # As a program; and it sees a changed byte.
    program = [sys.executable, spec.origin, directory]
    assert 'every digest matches' in subprocess.check_output(program + ['--verify'], text=True)
    assert 'columns F32 [300, 200] rank 1 box' in subprocess.check_output(program, text=True)
    path = version.part(1).file.name
    with open(path, 'r+b') as file:
        file.seek(100)
        byte = file.read(1)[0]
        file.seek(100)
        file.write(bytes([byte ^ 1]))
    result = subprocess.run(program + ['--verify'], stderr=subprocess.PIPE, text=True)
    assert result.returncode == 1 and 'chunk 0' in result.stderr, result
    print(f'read_checkpoint.py reads {codec}')


def check_document(source):
    with open(os.path.join(source, 'proto/read_checkpoint.py'), encoding='utf-8') as file:
        program = file.read()
    with open(os.path.join(source, 'proto/FORMAT.md'), encoding='utf-8') as file:
        assert '```python\n' + program + '```\n' in file.read(), 'FORMAT.md shows another read_checkpoint.py'


def check_protocol(source):
    """PROTOCOL.md has every message of messages.def, with its number, direction and states."""
    with open(os.path.join(source, 'proto/messages.def'), encoding='utf-8') as file:
        table = re.findall(r'^MESSAGE\( *(\d+), (\w+), +\w+, +([CD]), ([A-Z|]+),', file.read(), re.MULTILINE)
    with open(os.path.join(source, 'proto/PROTOCOL.md'), encoding='utf-8') as file:
        rows = re.findall(r'^\| (\d+) \| ([→←]) (\w+) \| ([A-Z, ]*?) ?\|', file.read(), re.MULTILINE)
    assert table
    assert [(number, '→' if side == 'C' else '←', name, '' if states == 'ANY' else states.replace('|', ', '))
            for number, name, side, states in table] == [(number, arrow, name, states)
                                                         for number, arrow, name, states in rows]


def main():
    sys.dont_write_bytecode = True
    writer, source = sys.argv[1:]
    check_document(source)
    check_protocol(source)
    with tempfile.TemporaryDirectory() as directory:
        for codec in 'raw', 'lz4':
            version = os.path.join(directory, codec)
            subprocess.check_call([writer, version, codec])
            if codec == 'raw':
                for rank in range(2):
                    path = os.path.join(version, f'rank-{rank:05d}.safetensors')
                    check_safetensors(path, rank)
                    check_package(path, rank)
            check_reader(source, version, codec)


if __name__ == '__main__':
    main()
