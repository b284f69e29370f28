# SPDX-License-Identifier: Apache-2.0
"""Flattening and restoring, on versions kept in memory (memory_handle.py). No torch is needed here."""
import array
import collections
import copy
import ctypes
import logging
import os
import subprocess
import sys
import textwrap
import unittest
from unittest import mock

import paths
import ckptd
from ckptd import arrays, binding, collective, watchdog
from memory_handle import Store, without_daemon


class Loader:
    def __init__(self):
        self.position = 0

    def state_dict(self):
        return {"position": self.position, "seen": bytearray(b"abc")}

    def load_state_dict(self, state):
        self.position, self.seen = state["position"], state["seen"]


class InMemory(unittest.TestCase):
    def setUp(self):
        self.store = Store()
        stand_in = without_daemon(self.store)
        stand_in.__enter__()
        self.addCleanup(stand_in.__exit__, None, None, None)

    def saved(self, step=1, **objects):
        with ckptd.Checkpointer("job", **objects) as ckpt:
            self.assertIs(ckpt.save(step), ckptd.SaveResult.SAVED)
            ckpt.fence()
        return self.store.versions[-1]

    def restored(self, options=None, **objects):
        with ckptd.Checkpointer("job", **objects) as ckpt:
            ckpt.restore(**(options or {}))
            return ckpt


class Plain(InMemory):
    def test_nothing_stored(self):
        with ckptd.Checkpointer("job", a={}) as ckpt:
            self.assertIsNone(ckpt.restore())

    def test_containers_change_in_place(self):
        inner = [1, 2]
        self.saved(d={"inner": [3, {4}], "new": (1, 2.5)}, q=collections.deque([1]), s={1})
        live, queue, members = {"inner": inner, "old": 1}, collections.deque(), {5}
        self.restored(d=live, q=queue, s=members)
        self.assertEqual(live, {"inner": [3, {4}], "new": (1, 2.5)})
        self.assertIs(live["inner"], inner)
        self.assertEqual((queue, members), (collections.deque([1]), {1}))

    def test_values(self):
        with ckptd.Checkpointer("job", epoch=3, shape=(1, 2)) as ckpt:
            ckpt.values["epoch"] = 4
            ckpt.save(1)
        ckpt = self.restored(epoch=0, shape=())
        self.assertEqual(ckpt.values, {"epoch": 4, "shape": (1, 2)})

    def test_buffers(self):
        memory = (ctypes.c_int16 * 3)(1, 2, 3)
        version = self.saved(b=bytearray(b"xyz"), a=array.array("d", [1.5, 2.5]), c=memory, d={"in": bytearray(b"q")})
        self.assertEqual({name: entry[0] for name, entry in version["tensors"].items()}, {
            "b": binding.DTYPES["u8"], "a": binding.DTYPES["f64"], "c": binding.DTYPES["i16"],
            "d/in": binding.DTYPES["u8"],
        })
        buffer, numbers, other, tree = bytearray(3), array.array("d", [0, 0]), (ctypes.c_int16 * 3)(), {}
        self.restored(b=buffer, a=numbers, c=other, d=tree)
        self.assertEqual((buffer, list(numbers), list(other), tree), (b"xyz", [1.5, 2.5], [1, 2, 3], {"in": b"q"}))

    def test_a_grown_bytearray(self):
        buffer = bytearray(b"ab")
        with ckptd.Checkpointer("job", b=buffer) as ckpt:
            ckpt.save(1)
            ckpt.fence()
            buffer += b"c" * 1000
            ckpt.save(2)
        live = bytearray()
        self.restored(b=live)
        self.assertEqual(live, buffer)

    def test_object_names_are_free(self):
        objects = {"a/b": bytearray(b"1"), "a": {"b": bytearray(b"2")}, "rank": bytearray(b"3")}
        version = self.saved(objects=objects)
        self.assertEqual(set(version["tensors"]), {"a%2Fb", "a/b", "rank"})
        live = {"a/b": bytearray(1), "a": {}, "rank": bytearray(1)}
        self.restored(objects=live)
        self.assertEqual(live, objects)

    def test_stateful(self):
        loader = Loader()
        with ckptd.Checkpointer("job", loader=loader) as ckpt:
            ckpt.save(1)
            loader.position = 5
            ckpt.save(2)
            ckpt.fence()
            # The bytearray is new at every save, and yet nothing had to be registered again.
            self.assertEqual([call for call in ckpt._handle.calls if call[0] == "protect"], [("protect", "loader/seen")])
        version = self.store.versions[-1]
        self.assertEqual(version["tensors"]["loader/seen"][2], binding.RANK_LOCAL | binding.EAGER)
        live = Loader()
        self.restored(loader=live)
        self.assertEqual((live.position, live.seen), (5, b"abc"))

    def test_python_generator(self):
        import random

        random.seed(5)
        self.saved(a=1)
        expected = random.random()
        self.restored(a=1)
        self.assertEqual(random.random(), expected)
        self.restored({"only": "a"}, a=1)
        self.assertNotEqual(random.random(), expected)

    def test_refusals_name_the_path(self):
        for objects, pattern in (
            ({"d": {"x": [object()]}}, "^d/x/0: a object cannot be stored"),
            ({"d": {"m": memoryview(b"abc")}}, "^d/m: a read-only buffer"),
            ({"f": lambda: 1}, "^f: a function cannot be stored"),
        ):
            with self.assertRaisesRegex(TypeError, pattern):
                ckptd.Checkpointer("job", **objects)
        with self.assertRaisesRegex(ValueError, "rng"):
            ckptd.Checkpointer("job", rng_=1, objects={"rng": 1})


class Strictness(InMemory):
    def setUp(self):
        super().setUp()
        self.saved(7, a={"x": bytearray(b"ab"), "n": 1}, b=bytearray(b"cd"))

    def check(self, pattern, options=None, **objects):
        before = repr(objects)
        with self.assertRaisesRegex(ckptd.RestoreMismatch, pattern) as caught:
            self.restored(options, **objects)
        self.assertEqual(repr(objects), before)
        return caught.exception

    def test_missing_and_unexpected(self):
        error = self.check("(?s)nothing was changed.*c: missing.*b .no such object", a={}, c=bytearray(2))
        self.assertEqual(len(error.problems), 3)

    def test_not_strict(self):
        live, other = {}, bytearray(b"zz")
        with self.assertLogs("ckptd", logging.WARNING) as logs:
            ckpt = ckptd.Checkpointer("job", a=live, c=other)
            self.assertEqual(ckpt.restore(strict=False), 7)
            ckpt.close()
        self.assertEqual((live, other), ({"x": b"ab", "n": 1}, b"zz"))
        self.assertIn("c: missing", logs.output[0])

    def test_only(self):
        live = {}
        self.restored({"only": ["a"]}, a=live)
        self.assertEqual(live["n"], 1)
        part = {"x": bytearray(2), "n": 5}
        self.restored({"only": "a/x"}, a=part, b=bytearray(2))
        self.assertEqual(part, {"x": b"ab", "n": 5})
        self.check("only='nothing' matches nothing", {"only": ["a", "nothing"]}, a={})

    def test_another_kind(self):
        self.check("a: stored as a plain, here a stateful", a=Loader(), b=bytearray(2))


class Saving(InMemory):
    def test_results(self):
        with ckptd.Checkpointer("job", a=bytearray(1)) as ckpt:
            self.assertEqual(ckpt.save(3), "saved")
            again = ckpt.save(3)
            self.assertEqual((str(again), bool(again)), ("already", True))
            self.assertFalse(ckptd.SaveResult.SKIPPED)
            for step in (-1, 1.5, True, "1"):
                with self.assertRaises(ValueError):
                    ckpt.save(step)
            with self.assertRaisesRegex(ValueError, "no level 'deep'"):
                ckpt.save(4, to="deep")
        with self.assertRaisesRegex(ValueError, "closed"):
            ckpt.save(5)
        self.assertTrue(ckpt.close())

    def test_a_dead_daemon_is_logged_at_each_doubling(self):
        with ckptd.Checkpointer("job", a=bytearray(1)) as ckpt:
            ckpt._handle.failure = ckptd.CheckpointError("the daemon went away", binding.E_UNREACHABLE)
            with self.assertLogs("ckptd", logging.INFO) as logs:
                for step in range(1, 10):
                    self.assertFalse(ckpt.save(step))
                ckpt._handle.failure = None
                self.assertTrue(ckpt.save(10))
            counts = [line.rpartition("(")[2].split()[0] for line in logs.output[:-1]]
            self.assertEqual(counts, ["1", "2", "4", "8"])
            self.assertIn("works again after 9", logs.output[-1])

    def test_failures_raise_if_asked(self):
        with ckptd.Checkpointer("job", on_failure="raise", a=bytearray(1)) as ckpt:
            ckpt._handle.failure = ckptd.CheckpointError("gone", binding.E_UNREACHABLE)
            with self.assertRaisesRegex(ckptd.CheckpointError, "gone"):
                ckpt.save(1)
            ckpt._handle.failure = None

    def test_mistakes_always_raise(self):
        with ckptd.Checkpointer("job", a=bytearray(1)) as ckpt:
            ckpt._handle.failure = ckptd.CheckpointError("steps must increase", binding.E_INVALID)
            with self.assertRaisesRegex(ckptd.CheckpointError, "steps must increase"):
                ckpt.save(1)
            ckpt._handle.failure = None

    def test_only_what_changed_is_registered_again(self):
        tree = {"a": bytearray(b"1"), "b": bytearray(b"2")}
        with ckptd.Checkpointer("job", d=tree) as ckpt:
            ckpt.save(1)
            ckpt.fence()
            del ckpt._handle.calls[:]
            ckpt.save(2)
            self.assertEqual(ckpt._handle.calls, [])
            tree["c"] = bytearray(b"3")
            tree["a"] = bytearray(b"four")
            ckpt.save(3)
            self.assertEqual(
                ckpt._handle.calls, [("unprotect", "d/a"), ("protect", "d/a"), ("protect", "d/c")]
            )
            del tree["b"]
            ckpt.save(4)
        self.assertEqual(set(self.store.versions[-1]["tensors"]), {"d/a", "d/c"})

    def test_a_refused_registration_is_repaired(self):
        tree = {"a": bytearray(b"1")}
        with ckptd.Checkpointer("job", d=tree) as ckpt:
            ckpt.save(1)
            tree["b"] = bytearray(b"2")
            with mock.patch.object(
                ckpt._handle, "protect", side_effect=ckptd.CheckpointError("too many", binding.E_LIMIT)
            ), self.assertLogs("ckptd"):
                self.assertFalse(ckpt.save(2))
            self.assertTrue(ckpt.save(3))
        self.assertEqual(set(self.store.versions[-1]["tensors"]), {"d/a", "d/b"})

    def test_a_forked_child_leaves_the_handle_alone(self):
        ckpt = ckptd.Checkpointer("job", a=bytearray(1))
        ckpt.save(1)
        child = os.fork()
        if child == 0:
            ckpt.close()
            os._exit(len(self.store.versions))
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        ckpt.close()
        self.assertEqual(len(self.store.versions), 1)


class Watch(unittest.TestCase):
    def make(self, action):
        self.now = 0.0
        return watchdog.DurabilityWatch(100.0, action, lambda: self.now)

    def test_warns(self):
        watch = self.make("warn")
        asked = []
        with self.assertLogs("ckptd") as logs:
            for self.now in (1.0, 50.0, 51.0, 101.0, 107.0):
                watch.check(lambda: asked.append(self.now))
        self.assertEqual(asked, [50.0, 101.0, 107.0])
        self.assertEqual(len(logs.output), 2)
        self.assertIn("no checkpoint became durable for 101 s", logs.output[0])

    def test_durable_versions_keep_it_quiet(self):
        watch = self.make("raise")
        for self.now in (50.0, 150.0, 250.0):
            watch.check(lambda: 20.0)
        self.now = 400.0
        with self.assertRaises(ckptd.NothingDurable):
            watch.check(lambda: 170.0)

    def test_old_versions_count_from_the_start(self):
        watch = self.make("raise")
        self.now = 90.0
        watch.check(lambda: 1e6)
        self.now = 101.0
        with self.assertRaises(ckptd.NothingDurable):
            watch.check(lambda: 1e6)

    def test_off(self):
        watch = watchdog.DurabilityWatch(0, "raise", lambda: 1e9)
        watch.check(lambda: self.fail("asked"))
        with self.assertRaises(ValueError):
            watchdog.DurabilityWatch(1, "ignore")


class Identity(unittest.TestCase):
    def test_alone(self):
        with mock.patch.dict(os.environ, clear=True):
            self.assertEqual(collective.identify(None, None, None), (0, 1, None))
            self.assertEqual(collective.identify(1, 2, "x"), (1, 2, "x"))
            with self.assertRaisesRegex(ValueError, "not below"):
                collective.identify(2, 2, None)
            with self.assertRaisesRegex(ValueError, "together"):
                collective.identify(1, None, None)

    def test_torchrun_without_a_group(self):
        with mock.patch.dict(os.environ, {"RANK": "1", "WORLD_SIZE": "2"}, clear=True):
            with self.assertRaisesRegex(RuntimeError, "init_process_group"):
                collective.identify(None, None, None)
            self.assertEqual(collective.identify(None, None, "mine"), (1, 2, "mine"))


class WithoutPackages(unittest.TestCase):
    """In a process of its own where torch, numpy or both cannot be imported."""

    def run_without(self, modules, program):
        text = "import sys\nfor name in %r: sys.modules[name] = None\n" % (modules,)
        text += "import paths\nfrom memory_handle import Store, without_daemon\nimport ckptd\n" + textwrap.dedent(program)
        done = subprocess.run(
            [sys.executable, "-c", text], cwd=os.path.dirname(os.path.abspath(__file__)), capture_output=True, text=True
        )
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_neither(self):
        self.run_without(["torch", "numpy"], """
            data = {"a": bytearray(b"123"), "n": 1.5}
            with without_daemon(Store()) as store:
                with ckptd.Checkpointer("job", data=data) as ckpt:
                    assert ckpt.save(1)
                live = {}
                with ckptd.Checkpointer("job", data=live) as ckpt:
                    assert ckpt.restore() == 1
            assert live == data
            assert [name for name in ("torch", "numpy") if sys.modules.get(name)] == []
        """)

    @paths.needs_numpy
    def test_numpy_alone(self):
        self.run_without(["torch"], """
            import numpy
            data = {"a": numpy.arange(6.0).reshape(2, 3).T, "s": numpy.float32(2)}
            numpy.random.seed(1)
            with without_daemon(Store()) as store:
                with ckptd.Checkpointer("job", data=data) as ckpt:
                    assert ckpt.save(1)
                drawn = numpy.random.rand()
                live = {}
                with ckptd.Checkpointer("job", data=live) as ckpt:
                    assert ckpt.restore() == 1
            assert (live["a"] == data["a"]).all() and live["s"] == 2 and type(live["s"]) is numpy.float32
            assert numpy.random.rand() == drawn
        """)


class Thing:
    def __init__(self):
        self.number = 1

    def __eq__(self, other):
        return self.number == other.number


class NoticingChanges(InMemory):
    """What did not change since the last save is not looked at closely: so whatever does change must be seen."""

    def check(self, state, *changes):
        with ckptd.Checkpointer("job", d=state, allow_pickle=True) as ckpt:
            for step, change in enumerate((lambda: None, lambda: None, *changes, lambda: None), start=1):
                change()
                expected = copy.deepcopy(state)
                self.assertIs(ckpt.save(step), ckptd.SaveResult.SAVED)
                ckpt.fence()
                live = {}
                self.restored({"step": step}, d=live, allow_pickle=True)
                self.compare(live, expected, step)

    def compare(self, live, expected, step):
        if "numpy" in sys.modules:
            sys.modules["numpy"].testing.assert_equal(live, expected, "after change %d" % (step - 2))
        else:
            self.assertEqual(live, expected, "after change %d" % (step - 2))

    def test_containers(self):
        state = {"n": 1, "f": 1.5, "list": [1, {"x": "y"}], "tuple": (1, [2]), "set": {1}, "thing": Thing(), "b": b"1",
                 "queue": collections.deque([1]), "buffer": bytearray(b"abc"), "none": None}
        self.check(
            state,
            lambda: state.update(n=2),
            lambda: state.update(n=True),
            lambda: state.update(f=float("inf")),
            lambda: state["list"].append(3),
            lambda: state["list"].reverse(),
            lambda: state["list"][1].update(x=5) if type(state["list"][1]) is dict else None,
            lambda: state["tuple"][1].append(None),
            lambda: state["set"].add(2),
            lambda: setattr(state["thing"], "number", 7),
            lambda: state["queue"].append(9),
            lambda: state["buffer"].extend(b"defgh"),
            lambda: state.update(buffer=bytearray(b"xyz")),
            lambda: state.update(list=[]),
            lambda: state.pop("none"),
            lambda: state.update(new={"deep": [{"er": 1}]}),
            lambda: state["new"]["deep"][0].update(er=2),
            lambda: state.update(b=state.pop("b")),
        )

    @paths.needs_numpy
    def test_arrays(self):
        import numpy

        state = {"a": numpy.arange(12.0), "in": {"b": numpy.arange(6, dtype="f4"), "c": numpy.zeros((2, 3))}, "n": 1}

        def grow():
            state["a"].resize(5000, refcheck=False)
            state["a"][:] = 3

        def reshape():
            state["a"].shape = (50, 100)

        def retype():
            state["in"]["b"].dtype = "i4"

        def restride():
            state["in"]["c"].strides = (0, 8)

        self.check(
            state, grow, reshape, retype, restride,
            lambda: state.update(n=2),
            lambda: state["a"].fill(7),
            lambda: state.update(a=numpy.ones(3)),
            lambda: state["in"].update(b=numpy.ones(6, "i4")),
            lambda: state["in"].pop("c"),
            lambda: state.update(a="no array"),
        )


@paths.needs_numpy
class Fingerprints(unittest.TestCase):
    def test_an_array_that_lies_elsewhere_makes_none(self):
        import numpy

        values = [numpy.zeros(3), numpy.zeros(3)]
        addresses = [value.ctypes.data for value in values]
        fingerprint = arrays.NumpyFingerprint.create(values, addresses)
        self.assertTrue(fingerprint is None or fingerprint.matches(values))
        self.assertIsNone(arrays.NumpyFingerprint.create(values, [addresses[0], addresses[1] + 8]))


@paths.needs_numpy
class Numpy(InMemory):
    def test_every_dtype_and_view(self):
        import numpy

        base = numpy.arange(24, dtype="f8").reshape(4, 6)
        objects = {
            kind: numpy.arange(5).astype(kind)
            for kind in ("?", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8", "c8", "c16")
        }
        objects.update({
            "reversed": base[::-1, ::2], "transposed": base.T, "broadcast": numpy.broadcast_to(base[0], (3, 6)),
            "zero": numpy.zeros((0, 3)), "point": numpy.array(5.0), "row": base[1],
        })
        version = self.saved(d=objects)
        self.assertEqual(len(version["tensors"]["d/row"][3]), 48)
        live = {}
        self.restored(d=live)
        into = {name: numpy.zeros_like(value) if name != "reversed" else numpy.zeros((8, 12))[::-2, ::4]
                for name, value in objects.items()}
        kept = dict(into)
        self.restored(d=into)
        for name, value in objects.items():
            for found in (live[name], into[name]):
                self.assertEqual((found.dtype, found.shape), (value.dtype, value.shape))
                numpy.testing.assert_array_equal(found, value)
            self.assertIs(into[name], kept[name])

    def test_refusals(self):
        import numpy

        for value, pattern in (
            (numpy.array([object()]), r"arrays of type '\|O'"), (numpy.zeros(3, ">f4"), "arrays of type '>f4'"),
            (numpy.zeros(3, "datetime64[s]"), "arrays of type"), (numpy.ma.masked_array([1.0], [True]), "masked"),
        ):
            with self.assertRaisesRegex(TypeError, "^d/x: .*" + pattern):
                ckptd.Checkpointer("job", d={"x": value})

    def test_interfaces(self):
        import numpy

        class Interface:
            def __init__(self, data):
                self.data = data
                self.__array_interface__ = data.__array_interface__

        class Exported:
            __array_interface__ = property(lambda self: self.data.__array_interface__)
            data = numpy.arange(3.0)

        self.saved(x=Exported())
        Exported.data = numpy.zeros(3)
        self.restored(x=Exported())
        self.assertEqual(list(Exported.data), [0, 1, 2])

    def test_shapes_dtypes_and_conversion(self):
        import numpy

        self.saved(d={"x": numpy.arange(3.0)})
        for value, pattern in (
            (numpy.zeros(4), r"shape \[3\], here \[4\]"), (numpy.zeros(3, "f4"), "stored as f64, here f32"),
        ):
            with self.assertRaisesRegex(ckptd.RestoreMismatch, "d/x: .*" + pattern):
                self.restored(d={"x": value})
        live = numpy.zeros(3, "f4")
        self.restored({"convert": True}, d={"x": live})
        self.assertEqual(list(live), [0, 1, 2])
        frozen = numpy.zeros(3)
        frozen.flags.writeable = False
        with self.assertRaisesRegex(ckptd.RestoreMismatch, "read-only"):
            self.restored(d={"x": frozen})

    def test_eager_and_fenced(self):
        import numpy

        eager, fenced = numpy.zeros(2), numpy.zeros(2)
        with ckptd.Checkpointer("job", e=eager, f=ckptd.fenced({"x": fenced})) as ckpt:
            ckpt.save(1)
            eager += 1
            ckpt.fence()
        tensors = self.store.versions[-1]["tensors"]
        self.assertEqual(tensors["e"][3], bytes(16))
        self.assertEqual((tensors["e"][2], tensors["f/x"][2]), (binding.EAGER, 0))

    def test_same_memory_under_two_names_is_stored_once(self):
        import numpy

        data = numpy.arange(4.0)
        with ckptd.Checkpointer("job", d={"a": data, "b": data, "view": data[1:]}) as ckpt:
            ckpt.save(1)
            self.assertEqual(ckpt._handle.aliases, {"d/b": "d/a"})
            self.assertEqual([shard["name"] for shard in ckpt._handle.shards.values()], ["d/a", "d/view"])
        live = {}
        self.restored(d=live)
        self.assertEqual(list(live["b"]), [0, 1, 2, 3])

    def test_ranks(self):
        import numpy

        for options, shared, local in (({}, (1, 2), (0, 1)), ({"replicated": False}, None, None)):
            with ckptd.Checkpointer(
                "job", rank=1, world=2, run_id="r", a=numpy.zeros(2), b=ckptd.rank_local(numpy.zeros(2)),
                c=ckptd.shard(numpy.zeros(2), (4,), (2,)), **options
            ) as ckpt:
                ckpt.save(1)
                shards = {shard["name"]: shard for shard in ckpt._handle.shards.values()}
                ckpt.fence()
            self.assertEqual(bool(shards["a"]["flags"] & binding.RANK_LOCAL), bool(options))
            self.assertEqual(shards["a"]["replica"], (0, 1) if options else (1, 2))
            self.assertTrue(shards["b"]["flags"] & binding.RANK_LOCAL)
            self.assertEqual((shards["c"]["shape"], shards["c"]["box"]), ((4,), ((2,), (2,))))
            self.store.versions.clear()
        with self.assertRaisesRegex(ValueError, "does not lie in"):
            ckptd.shard(numpy.zeros(3), (4,), (2,))


if __name__ == "__main__":
    unittest.main()
