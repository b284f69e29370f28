#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads a version of a ckptd checkpoint without ckptd: python3 and numpy, the module xxhash, and
lz4 for compressed parts.

    read_checkpoint.py DIRECTORY              lists the tensors
    read_checkpoint.py DIRECTORY --verify     checks every digest of every part
    read_checkpoint.py DIRECTORY NAME OUTPUT  writes a tensor as .npy

DIRECTORY is <root>/<job>/<generation>/<step>. From Python: Version(DIRECTORY).read(NAME)."""
import json
import os
import sys

import numpy
import xxhash

LEAF = 256 * 1024
# numpy has no bfloat16 and no 8-bit floats: these come as unsigned integers with the same bits.
DTYPES = {'BOOL': '?', 'U8': 'u1', 'I8': 'i1', 'F8_E5M2': 'u1', 'F8_E4M3': 'u1', 'I16': '<i2', 'U16': '<u2',
          'F16': '<f2', 'BF16': '<u2', 'I32': '<i4', 'U32': '<u4', 'F32': '<f4', 'I64': '<i8', 'U64': '<u8',
          'F64': '<f8', 'C64': '<c8', 'C128': '<c16'}


class Damaged(Exception):
    pass


def digest(data):
    return xxhash.xxh3_128(data).digest()


def chunk_digest(raw):
    leaves = [digest(raw[at:at + LEAF]) for at in range(0, max(len(raw), 1), LEAF)]
    return digest(b''.join(leaves))


def read_lines(path, expected):
    """The lines of a manifest or complete.json as Python values, after checking both digests."""
    with open(path, 'rb') as file:
        data = file.read()
    end = data.rfind(b'{"digest":"')
    if end < 0 or data[end:] != b'{"digest":"%s"}\n' % digest(data[:end]).hex().encode():
        raise Damaged(f'{path}: the last line does not match')
    lines = data[:end].splitlines(keepends=True)
    seal = lines[0].rfind(b',"digest":"')
    if lines[0][seal:] != b',"digest":"%s"}\n' % digest(lines[0][:seal]).hex().encode():
        raise Damaged(f'{path}: the first line does not match')
    values = [json.loads(line) for line in lines]
    if values[0]['format'] != expected or values[0]['version'] != 1:
        raise Damaged(f'{path}: not {expected} version 1')
    return values


class Part:
    """What one rank contributed: an image, cut into chunks, of which each is verified when it is read."""

    def __init__(self, directory, rank):
        self.path = os.path.join(directory, f'rank-{rank:05d}.json')
        self.head, *lines = read_lines(self.path, 'ckptd-manifest')
        if 'absent' in self.head:
            raise Damaged(f'{self.path}: no part: {self.head["absent"]}')
        self.chunks, self.pieces = lines[:self.head['chunks']], lines[self.head['chunks']:]
        self.file = open(os.path.join(directory, self.head['file']), 'rb')
        self.last = None, None
        if os.fstat(self.file.fileno()).st_size != self.head['file_length']:
            raise Damaged(f'{self.file.name}: wrong length')
        if digest(b''.join(bytes.fromhex(chunk[2]) for chunk in self.chunks)).hex() != self.head['image_digest']:
            raise Damaged(f'{self.path}: the chunks are not those of the image')

    def chunk(self, number):
        if self.last[0] == number:
            return self.last[1]
        offset, stored, expected = self.chunks[number]
        size = self.head['chunk_size']
        length = min(size, self.head['image_size'] - number * size)
        self.file.seek(offset)
        raw = self.file.read(stored)
        if stored != length:
            import lz4.block
            try:
                raw = lz4.block.decompress(raw, uncompressed_size=length)
            except lz4.block.LZ4BlockError as error:
                raise Damaged(f'{self.file.name}: chunk {number}: {error}') from error
        if len(raw) != length or chunk_digest(raw).hex() != expected:
            raise Damaged(f'{self.file.name}: chunk {number} does not match its digest')
        self.last = number, raw
        return raw

    def read(self, offset, length):
        size, parts = self.head['chunk_size'], []
        while length:
            number, start = divmod(offset, size)
            parts.append(self.chunk(number)[start:start + length])
            offset, length = offset + len(parts[-1]), length - len(parts[-1])
        return b''.join(parts)

    def state(self):
        """The bytes that were saved inline with this rank's tensors."""
        return self.read(*self.head.get('state', (0, 0)))


class Version:
    def __init__(self, directory):
        self.directory = directory
        self.head, *lines = read_lines(os.path.join(directory, 'complete.json'), 'ckptd-complete')
        self.ranks, self.pieces = lines[:self.head['world']], lines[self.head['world']:]
        self.parts = {}

    def part(self, rank):
        if rank not in self.parts:
            self.parts[rank] = Part(self.directory, rank)
            if self.parts[rank].head['image_digest'] != self.ranks[rank][2]:
                raise Damaged(f'{self.parts[rank].path}: not the part that complete.json names')
        return self.parts[rank]

    def read(self, name, rank=None):
        """A tensor, put together from its pieces. A rank-local one needs its rank."""
        pieces = [piece for piece in self.pieces if piece['name'] == name and
                  (piece['rank'] == rank and 'local' in piece if rank is not None else 'local' not in piece)]
        if not pieces:
            raise KeyError(name)
        if 'alias' in pieces[0]:
            return self.read(pieces[0]['alias'], rank)
        dtype, shape = numpy.dtype(DTYPES[pieces[0]['dtype']]), pieces[0]['shape']
        whole = numpy.empty(shape, dtype)
        for piece in pieces:
            if 'range' in piece:
                start, count = piece['range']
                target = whole.reshape(-1)[start:start + count]
            else:
                offset, extent = piece.get('box', ([0] * len(shape), shape))
                target = whole[(*(slice(o, o + e) for o, e in zip(offset, extent)), ...)]
            raw = self.part(piece['rank']).read(piece['at'], target.size * dtype.itemsize)
            target[...] = numpy.frombuffer(raw, dtype).reshape(target.shape)
        return whole

    def verify(self):
        for rank in range(self.head['world']):
            part = self.part(rank)
            for number in range(len(part.chunks)):
                part.chunk(number)


def main(arguments):
    version = Version(arguments[0])
    if arguments[1:] == ['--verify']:
        version.verify()
        print(f'{version.head["job"]} {version.head["generation"]}/{version.head["step"]}: every digest matches')
    elif len(arguments) == 3:
        numpy.save(arguments[2], version.read(arguments[1]))
    else:
        for piece in version.pieces:
            place = next((f'{key} {piece[key]}' for key in ('box', 'range', 'alias') if key in piece), '')
            local = ' local' if 'local' in piece else ''
            print(f'{piece["name"]} {piece["dtype"]} {piece["shape"]} rank {piece["rank"]}{local} {place}'.rstrip())


if __name__ == '__main__':
    if len(sys.argv) not in (2, 3, 4):
        sys.exit(__doc__)
    try:
        main(sys.argv[1:])
    except (Damaged, OSError, KeyError) as error:
        sys.exit(f'read_checkpoint.py: {error}')
