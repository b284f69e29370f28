# SPDX-License-Identifier: Apache-2.0
import collections
import datetime
import decimal
import enum
import fractions
import json
import math
import pathlib
import random
import struct
import unittest
import uuid

import paths
from ckptd import typed


class Colour(enum.Enum):
    RED = 1
    GREEN = "g"


class Size(enum.IntEnum):
    SMALL = 1


class Opaque:
    pass


def same(left, right):
    """Equal with equal types all the way down, floats by their bits and dicts by their order."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack(">d", left) == struct.pack(">d", right)
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, dict):
        if getattr(left, "default_factory", None) is not getattr(right, "default_factory", None):
            return False
        return len(left) == len(right) and all(
            same(a, b) and same(left[a], right[b]) for a, b in zip(left, right)
        )
    if isinstance(left, (list, tuple, collections.deque)):
        if getattr(left, "maxlen", None) != getattr(right, "maxlen", None):
            return False
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


VALUES = [
    None, True, False, 0, -1, 1 << 63, -(1 << 63) - 1, 1 << 100, -(1 << 70), 0.0, -0.0, 0.1, 5e-324, 1.7976931348623157e308,
    math.inf, -math.inf, math.nan, struct.unpack(">d", bytes.fromhex("fff800000000dead"))[0], "", "text", "\0\n\"\\",
    "\ud800", "\U0001f600", b"", b"\0\xff", 1j, complex(math.nan, -0.0), [], [1, [2, [3]]], (), (1,), ((), [()]),
    {}, {"a": 1, "": 2}, {"$": 1}, {"$": "tuple", "v": []}, {1: "int", "1": "str", 1.5: 2, None: 3, (1, "x"): 4},
    {True: 1}, {0: 0, 1: 1}, set(), {1, 2, "a"}, frozenset({(1, 2)}), {frozenset({1}): 1},
    collections.OrderedDict([("b", 1), ("a", 2)]), collections.defaultdict(list, {"a": [1]}),
    collections.defaultdict(None, {1: 2}), collections.Counter("aab"), collections.deque([1, 2], maxlen=3),
    range(1, 10, 2), slice(1, None, 2), Ellipsis, datetime.datetime(2024, 2, 29, 1, 2, 3, 4, fold=1),
    datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=-3))), datetime.date(1, 1, 1),
    datetime.time(1, 2, 3), datetime.timedelta(-1, 2, 3), decimal.Decimal("1.10"), fractions.Fraction(1, 3),
    uuid.UUID(int=5), pathlib.Path("/a/b"), Colour.RED, Colour.GREEN, Size.SMALL, random.Random(1).getstate(),
]


class RoundTrip(unittest.TestCase):
    def check(self, value):
        text = typed.dumps(value)
        self.assertTrue(text.isascii())
        json.loads(text, parse_constant=lambda name: self.fail("%s is no JSON" % name))
        back = typed.loads(text)
        self.assertTrue(same(value, back), "%r became %r through %s" % (value, back, text[:200]))

    def test_every_kind(self):
        for value in VALUES:
            with self.subTest(value=repr(value)[:80]):
                self.check(value)

    def test_random_trees(self):
        chance = paths.seeded("test_random_trees")
        atoms = [value for value in VALUES if not isinstance(value, (list, dict, set, tuple, collections.deque))]
        keys = [value for value in atoms if not isinstance(value, (slice, float, complex)) and value is not Ellipsis]

        def tree(depth):
            kind = chance.randrange(9) if depth else 8
            size = chance.randrange(4)
            if kind == 0:
                return [tree(depth - 1) for _ in range(size)]
            if kind == 1:
                return tuple(tree(depth - 1) for _ in range(size))
            if kind in (2, 3):
                return {chance.choice(keys): tree(depth - 1) for _ in range(size)}
            if kind == 4:
                return {chance.choice(["$", "v", "a", ""]): tree(depth - 1) for _ in range(size)}
            if kind == 5:
                return collections.OrderedDict((chance.choice(keys), tree(depth - 1)) for _ in range(size))
            if kind == 6:
                return set(chance.sample(keys, size))
            if kind == 7:
                return struct.unpack(">d", chance.randbytes(8))[0]
            return chance.choice(atoms)

        for _ in range(2000):
            self.check(tree(4))

    def test_integers_of_any_size(self):
        value = {1 << 20000: -(1 << 20001)}
        self.assertTrue(same(value, typed.loads(typed.dumps(value))))

    def test_order_of_sets_is_fixed(self):
        self.assertEqual(typed.dumps({"b", "a", "c"}), typed.dumps({"c", "b", "a"}))

    @paths.needs_numpy
    def test_numpy_scalars(self):
        import numpy

        for value in (
            numpy.float32(0.1), numpy.float64(math.nan), numpy.int8(-3), numpy.uint64(1 << 63), numpy.bool_(True),
            numpy.complex64(1 + 2j), numpy.float16(2), numpy.datetime64("2024-01-01"), numpy.str_("x"),
        ):
            back = typed.loads(typed.dumps(value))
            self.assertIs(type(back), type(value))
            self.assertEqual(back.tobytes(), value.tobytes())
        self.assertEqual(typed.loads(typed.dumps(numpy.dtype("<f4"))), numpy.dtype("<f4"))

    @paths.needs_torch
    def test_torch_kinds(self):
        import torch

        for value in (
            torch.Size([2, 3]), torch.float32, torch.bfloat16, torch.device("cuda:1"), torch.strided,
            torch.channels_last,
        ):
            back = typed.loads(typed.dumps(value))
            self.assertIs(type(back), type(value))
            self.assertEqual(back, value)


class Refusals(unittest.TestCase):
    def test_the_path_is_named(self):
        with self.assertRaisesRegex(TypeError, r"^data/a/%i3/1: a .*Opaque cannot be stored; .*allow_pickle"):
            typed.encode({"a": {3: [1, Opaque()]}}, "data")

    def test_keys(self):
        with self.assertRaisesRegex(TypeError, "^data/a: a key or set member of type .*Opaque"):
            typed.encode({"a": {Opaque(): 1}}, "data")

    def test_cycles_and_depth(self):
        ring = []
        ring.append(ring)
        with self.assertRaisesRegex(TypeError, "contains itself"):
            typed.encode(ring, "data")
        shared = [1]
        self.assertEqual(typed.decode(typed.encode([shared, shared], ""), ""), [[1], [1]])
        deep = []
        for _ in range(100000):
            deep = [deep]
        with self.assertRaisesRegex(TypeError, "nested too deeply"):
            typed.encode(deep, "data")
        while deep:
            deep = deep.pop()

    def test_subclasses_are_not_flattened_silently(self):
        for value in (type("Sub", (dict,), {})(), type("Text", (str,), {})("x"), collections.namedtuple("P", "x")(1)):
            with self.assertRaises(TypeError):
                typed.encode(value, "data")

    def test_defaultdict_with_other_factories(self):
        with self.assertRaisesRegex(TypeError, "^data: a defaultdict"):
            typed.encode(collections.defaultdict(lambda: 1), "data")

    def test_pickle_only_when_asked_on_both_sides(self):
        value = Opaque()
        encoded = typed.encode([value], "data", allow_pickle=True)
        with self.assertRaisesRegex(ValueError, "^data/0: stored by pickle"):
            typed.decode(encoded, "data")
        self.assertIsInstance(typed.decode(encoded, "data", allow_pickle=True)[0], Opaque)

    def test_enumerations_of_modules_not_imported(self):
        with self.assertRaisesRegex(ValueError, "not imported"):
            typed.loads('{"$":"enum","type":"no.such:Thing","v":"A"}')
        with self.assertRaisesRegex(ValueError, "not imported"):
            typed.loads('{"$":"enum","type":"os:system","v":"A"}')

    def test_unknown_kinds(self):
        with self.assertRaisesRegex(ValueError, "unknown stored type 'later'"):
            typed.loads('{"$":"later"}')


if __name__ == "__main__":
    unittest.main()
