# SPDX-License-Identifier: Apache-2.0
"""Through the real library and daemon."""
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import unittest

import paths
import support
import ckptd
from ckptd import Level

if paths.HAVE_NUMPY:
    import numpy
if paths.HAVE_TORCH:
    import torch
    from torch import nn


def run(daemon, program, *arguments, **options):
    """Starts a Python program that uses the daemon."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)], env=daemon.environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def finish(process):
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    return out


def save_until_accepted(test, ckpt, step):
    end = time.monotonic() + support.PATIENCE
    while not ckpt.save(step):
        test.assertLess(time.monotonic(), end)
        step += 1
        time.sleep(0.05)


class Basics(support.WithDaemon):
    def test_nothing_stored(self):
        ckpt = self.open(data={"a": bytearray(3)})
        self.assertIsNone(ckpt.restore())
        self.assertEqual(ckpt.versions(), [])
        self.assertIsNone(ckpt.last_durable("local"))
        self.assertTrue(ckpt.info.connected)
        self.assertEqual(ckpt.info.levels & {Level.LOCAL, Level.GLOBAL}, {Level.LOCAL, Level.GLOBAL})

    def test_save_wait_restore(self):
        data = {"a": bytearray(b"abc"), "n": (1, 2.5)}
        with self.open(data=data, epoch=1) as ckpt:
            self.assertEqual(ckpt.save(3), "saved")
            self.assertEqual(ckpt.save(3), "already")
            data["a"][:] = b"xyz"
            self.assertTrue(ckpt.wait("local"))
            self.assertTrue(ckpt.wait(Level.GLOBAL, 3))
            with self.assertRaises(ckptd.CheckpointError):
                ckpt.save(2)
            newest = ckpt.versions()[0]
            self.assertEqual((newest.step, newest.world, newest.pinned), (3, 1, False))
            self.assertIn(Level.GLOBAL, newest.levels)
            self.assertEqual(ckpt.last_durable("global").step, 3)
            self.assertLess(ckpt.last_durable("global").age, 60)
            self.assertEqual(ckpt.info.saves, 1)
        with self.open(data=data, epoch=0) as ckpt:
            self.assertEqual(ckpt.info.resumes[1], 3)
            self.assertEqual(ckpt.restore(), 3)
            self.assertEqual(ckpt.values, {"epoch": 1})
        self.assertEqual(data, {"a": b"abc", "n": (1, 2.5)})

    def test_older_versions(self):
        data = {"n": 0, "array": bytearray(5)}
        with self.open(data=data) as ckpt:
            for data["n"] in range(1, 5):
                ckpt.save(data["n"])
                ckpt.wait("local")
            self.assertEqual((ckpt.restore(2), data["n"]), (2, 2))
            self.assertEqual((ckpt.restore(3, ckpt.info.generation), data["n"]), (3, 3))
            self.assertEqual((ckpt.restore(), data["n"]), (4, 4))
            with self.assertRaises(ckptd.CheckpointError) as caught:
                ckpt.restore(99)
            self.assertEqual(caught.exception.code_name, "CKPT_E_NOT_FOUND")

    def test_values_alone(self):
        with self.open(epoch=5) as ckpt:
            self.assertTrue(ckpt.save(1))
            self.assertTrue(ckpt.wait("local"))
        with self.open(epoch=0) as ckpt:
            self.assertEqual((ckpt.restore(), ckpt.values["epoch"]), (1, 5))

    def test_levels_are_asked_for(self):
        with self.open(data={"a": bytearray(3)}) as ckpt:
            ckpt.save(1, to="local")
            self.assertTrue(ckpt.wait("local"))
            self.assertFalse(ckpt.wait("global", timeout=30))

    def test_a_mistake_keeps_live_objects(self):
        with self.open(data={"a": bytearray(b"abc"), "b": 1}) as ckpt:
            ckpt.save(1)
            ckpt.wait("local")
        live = {"a": bytearray(b"q")}
        with self.open(data=live, more=bytearray(2)) as ckpt:
            with self.assertRaisesRegex(ckptd.RestoreMismatch, "more: missing"):
                ckpt.restore()
        self.assertEqual(live, {"a": b"q"})

    def test_forked_children(self):
        ckpt = self.open(data={"a": bytearray(3)})
        ckpt.save(1)
        child = os.fork()
        if child == 0:
            try:
                ckpt.save(2)
            except ckptd.CheckpointError as error:
                os._exit(0 if error.code_name == "CKPT_E_FORKED" else 1)
            os._exit(2)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        self.assertEqual(ckpt.save(2), "saved")
        self.assertTrue(ckpt.wait("local"))

    def test_no_torch_and_no_numpy(self):
        finish(run(self.daemon, """
            import sys
            sys.modules["torch"] = sys.modules["numpy"] = None
            import ckptd
            data = {"a": bytearray(b"abc")}
            with ckptd.Checkpointer("bare", data=data) as ckpt:
                assert ckpt.save(1) and ckpt.wait("local")
            data["a"][:] = b"zzz"
            with ckptd.Checkpointer("bare", data=data) as ckpt:
                assert ckpt.restore() == 1
            assert data == {"a": b"abc"}
        """))


@paths.needs_numpy
class Arrays(support.WithDaemon):
    def test_every_dtype_and_view(self):
        base = numpy.random.rand(40, 60)
        data = {
            kind: numpy.arange(50).astype(kind)
            for kind in ("?", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8", "c8", "c16")
        }
        data.update({
            "reversed": base[::-1, ::2], "transposed": base.T, "broadcast": numpy.broadcast_to(base[0], (3, 60)),
            "zero": numpy.zeros((0, 3)), "point": numpy.array(5.0), "row": base[1],
            "large": numpy.random.rand(5 << 20), "same": base[1],
        })
        with self.open(data=data, fenced=ckptd.fenced(dict(data))) as ckpt:
            self.assertTrue(ckpt.save(1))
            self.assertTrue(ckpt.wait("local"))
        live, into = {}, {name: numpy.empty_like(value) for name, value in data.items()}
        into["reversed"] = numpy.zeros((80, 120))[::-2, ::4]
        with self.open(data=live, fenced=into) as ckpt:
            self.assertEqual(ckpt.restore(), 1)
        for name, value in data.items():
            for found in (live[name], into[name]):
                self.assertEqual((found.dtype, found.shape), (value.dtype, value.shape), name)
                numpy.testing.assert_array_equal(found, value)

    def test_eager_arrays_may_change_at_once(self):
        small, large = numpy.zeros(1000), numpy.zeros(8 << 20)
        with self.open(data=[small, large]) as ckpt:
            for step in range(1, 4):
                small[:], large[:] = step, step
                self.assertTrue(ckpt.save(step))
                small[:], large[:] = -1, -1
            self.assertTrue(ckpt.wait("local"))
        with self.open(data=[small, large]) as ckpt:
            ckpt.restore()
        self.assertTrue((small == 3).all() and (large == 3).all())

    def test_check_finds_memory_that_changed(self):
        data = numpy.zeros(64 << 20, "u1")
        with self.open(data=ckptd.fenced(data), fence_timeout=20.0) as ckpt:
            self.assertTrue(ckpt.save(1, check=True))
            self.assertTrue(ckpt.fence())
            stop = threading.Event()

            def change():
                while not stop.is_set():
                    numpy.add(data, 1, out=data)

            thread = threading.Thread(target=change)
            thread.start()
            try:
                with self.assertLogs("ckptd") as logs:
                    self.assertTrue(ckpt.save(2, check=True))
                    self.assertFalse(ckpt.fence())
            finally:
                stop.set()
                thread.join()
            self.assertIn("the memory of data changed", logs.output[0])
            self.assertTrue(ckpt.save(3, check=True))
            self.assertTrue(ckpt.wait("local"))
        self.assertEqual([version.step for version in self.open(data=data).versions()], [3, 1])

    def test_a_grown_dict(self):
        data = {}
        with self.open(data=data) as ckpt:
            for step in range(1, 6):
                data[step] = numpy.full(step, float(step))
                data.pop(step - 2, None)
                self.assertTrue(ckpt.save(step))
            self.assertTrue(ckpt.wait("local"))
        live = {"old": numpy.zeros(2)}
        with self.open(data=live) as ckpt:
            ckpt.restore()
        self.assertEqual({key: value.tolist() for key, value in live.items()}, {4: [4.0] * 4, 5: [5.0] * 5})

    def test_ranks_and_another_number_of_them(self):
        program = """
            import sys, ckptd, numpy
            rank, world, run, action = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
            rows = 12 // world
            grid = numpy.zeros((rows, 4))
            shared, own, epoch = numpy.zeros(5), {"x": numpy.zeros(2), "r": -1}, 0
            if action == "save":
                grid += numpy.arange(rank * rows, (rank + 1) * rows)[:, None]
                shared += 7
                own = {"x": numpy.full(2, float(rank)), "r": rank}
                epoch = 9
            with ckptd.Checkpointer(
                "grid", rank=rank, world=world, run_id=run, shared=shared, own=ckptd.rank_local(own), epoch=epoch,
                grid=ckptd.shard(grid, (12, 4), (rank * rows, 0)),
            ) as ckpt:
                if action == "save":
                    assert ckpt.save(5) and ckpt.wait("local", timeout=60)
                else:
                    assert ckpt.restore() == 5
                    assert (shared == 7).all() and ckpt.values["epoch"] == 9, (shared, ckpt.values)
                    assert (grid == numpy.arange(rank * rows, (rank + 1) * rows)[:, None]).all(), grid
                    print(own["r"], own["x"].tolist())
        """
        for process in [run(self.daemon, program, rank, 2, "one", "save") for rank in range(2)]:
            finish(process)
        self.assertEqual(finish(run(self.daemon, program, 0, 1, "two", "load")), "0 [0.0, 0.0]\n")
        printed = [
            finish(process) for process in [run(self.daemon, program, rank, 3, "three", "load") for rank in range(3)]
        ]
        self.assertEqual(printed, ["0 [0.0, 0.0]\n", "1 [1.0, 1.0]\n", "-1 [0.0, 0.0]\n"])


@paths.needs_numpy
class Trouble(support.WithDaemon):
    def test_a_killed_daemon_does_not_hurt(self):
        data = numpy.zeros(1000)
        with self.open(data=data) as ckpt:
            self.assertTrue(ckpt.save(1))
            self.assertTrue(ckpt.wait("local"))
            self.daemon.kill()
            with self.assertLogs("ckptd"):
                for step in range(2, 6):
                    data += 1
                    saved = ckpt.save(step)  # the kernel may take its time to close what the daemon had open
                    self.assertFalse(ckpt.fence() and saved)
            self.daemon.start()
            save_until_accepted(self, ckpt, 6)
            self.assertTrue(ckpt.wait("local"))
        self.assertEqual(data[0], 4)

    def test_a_stopped_daemon_is_not_waited_for(self):
        with self.open(data=numpy.zeros(1000), fence_timeout=1.0, busy_timeout=0.2) as ckpt:
            self.assertTrue(ckpt.save(1))
            self.assertTrue(ckpt.wait("local"))
            self.daemon.process.send_signal(signal.SIGSTOP)
            try:
                begin = time.monotonic()
                with self.assertLogs("ckptd"):
                    self.assertTrue(ckpt.save(2))  # room was kept for it
                    self.assertFalse(ckpt.fence())
                    self.assertFalse(ckpt.save(3))
                self.assertLess(time.monotonic() - begin, 10)
            finally:
                self.daemon.process.send_signal(signal.SIGCONT)


@paths.needs_numpy
class Waiting(support.WithDaemon):
    options = {"parallel": "delay_ms = 300"}

    def interrupt_after(self, seconds):
        main = threading.main_thread().ident
        timer = threading.Timer(seconds, lambda: signal.pthread_kill(main, signal.SIGINT))
        timer.start()
        self.addCleanup(timer.join)

    def test_ctrl_c_ends_a_wait(self):
        with self.open(data=numpy.zeros(1000)) as ckpt:
            ckpt.save(1)
            self.assertTrue(ckpt.wait("local"))
            self.interrupt_after(0.3)
            begin = time.monotonic()
            with self.assertRaises(KeyboardInterrupt):
                ckpt.wait("global")
            self.assertLess(time.monotonic() - begin, 1.5)
            self.assertTrue(ckpt.save(2))

    def test_ctrl_c_ends_a_fence_and_an_opening(self):
        """A stopped daemon answers nothing, and a checked save needs its answer at the fence."""
        data = numpy.zeros(1 << 20, "u1")
        ckpt = self.open(data=ckptd.fenced(data), fence_timeout=4.0)
        self.assertTrue(ckpt.save(1, check=True))
        self.daemon.process.send_signal(signal.SIGSTOP)
        try:
            for action in (ckpt.fence, lambda: self.open("other", open_timeout=4.0)):
                self.interrupt_after(0.3)
                begin = time.monotonic()
                with self.assertRaises(KeyboardInterrupt):
                    action()
                self.assertLess(time.monotonic() - begin, 1.5)
        finally:
            self.daemon.process.send_signal(signal.SIGCONT)
        save_until_accepted(self, ckpt, 2)

    def test_the_wait_has_a_deadline(self):
        with self.open(data=numpy.zeros(1000)) as ckpt:
            ckpt.save(1)
            with self.assertRaises(TimeoutError):
                ckpt.wait("global", timeout=0.3)


TRAINER = """
    import json, sys, warnings, torch, ckptd
    from torch import nn
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    steps, checkpoint = int(sys.argv[1]), sys.argv[2] == "yes"
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 8))
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps + 1)
    ckpt = ckptd.Checkpointer(
        "train", model=model, average=average, optimizer=optimizer, scheduler=scheduler
    ) if checkpoint else None
    start = ckpt.restore() if ckpt else None
    for step in range(0 if start is None else start + 1, steps):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 32)).pow(2).mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
        print(step, loss.item().hex(), flush=True)  # before the save: what can be resumed from was told
        if ckpt:
            ckpt.save(step)
    if ckpt:
        ckpt.wait("local")
        ckpt.close()
    total = {}
    for name, value in list(model.state_dict().items()) + list(average.state_dict().items()):
        total[name] = value.double().sum().item().hex()
    for parameter in model.parameters():
        total["moment %d" % len(total)] = optimizer.state[parameter]["exp_avg_sq"].double().sum().item().hex()
    print(json.dumps(total, sort_keys=True))
"""


@paths.needs_torch
class Training(support.WithDaemon):
    def test_killed_runs_end_like_an_unbroken_one(self):
        steps = 60
        reference = finish(run(self.daemon, TRAINER, steps, "no")).splitlines()
        losses = {}
        for stop_after in (9, 23, 41, None):
            trainer = run(self.daemon, TRAINER, steps, "yes")
            for line in trainer.stdout:
                losses[line.split()[0]] = line.strip()
                if stop_after is not None and line.startswith("%d " % stop_after):
                    trainer.kill()
                    break
            for line in trainer.stdout:  # what it still said before it died
                if line.endswith("\n"):
                    losses[line.split()[0]] = line.strip()
            error = trainer.stderr.read()
            trainer.stdout.close()
            trainer.stderr.close()
            code = trainer.wait()
            self.assertEqual(code, 0 if stop_after is None else -signal.SIGKILL, error)
        self.assertEqual(line.strip(), reference[-1])
        for expected in reference[:-1]:
            self.assertEqual(losses[expected.split()[0]], expected)

    def test_every_dtype_and_view(self):
        kinds = [getattr(torch, name) for name in (
            "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 uint16 uint32 uint64 "
            "float8_e4m3fn float8_e5m2"
        ).split() if hasattr(torch, name)]
        data = {}
        for kind in kinds:
            raw = torch.arange(6 * torch.empty(0, dtype=kind).element_size(), dtype=torch.uint8)
            data[str(kind)] = (raw % 2 if kind is torch.bool else raw).view(kind).reshape(2, 3)
        base = torch.randn(40, 60)
        data.update({
            "transposed": base.t(), "strided": base[::2, 1::3], "slice": base[1:3], "expanded": base[:, :1].expand(40, 5),
            "scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4),
            "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        })
        with self.open(data=data, fenced=ckptd.fenced({key: value for key, value in data.items()})) as ckpt:
            self.assertTrue(ckpt.save(1))
            self.assertTrue(ckpt.wait("local"))
        live, into = {}, {key: torch.zeros_like(value) for key, value in data.items()}
        with self.open(data=live, fenced=into) as ckpt:
            ckpt.restore()
        for key, value in data.items():
            for found in (live[key], into[key]):
                self.assertEqual((found.dtype, found.shape), (value.dtype, value.shape), key)
                same = [each.contiguous().view(torch.uint8) if each.dim() and each.numel() else each for each in (found, value)]
                self.assertTrue(torch.equal(*same), key)

    def test_tied_weights_and_grown_state(self):
        def make():
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            model[1].weight = model[0].weight
            return model, torch.optim.Adam(model.parameters(), 0.1)

        model, optimizer = make()
        with self.open(model=model, optimizer=optimizer) as ckpt:
            for step in range(4):
                self.assertTrue(ckpt.save(step))
                model(torch.randn(2, 8)).sum().backward()
                optimizer.step()
            self.assertTrue(ckpt.save(4))
            self.assertTrue(ckpt.wait("local"))
        other, planned = make()
        with self.open(model=other, optimizer=planned) as ckpt:
            self.assertEqual(ckpt.restore(), 4)
            self.assertEqual(ckpt.restore(0), 0)
            self.assertFalse(planned.state)
            self.assertEqual(ckpt.restore(4), 4)
        for left, right in zip(model.parameters(), other.parameters()):
            self.assertTrue(torch.equal(left, right))
            for key, value in optimizer.state[left].items():
                self.assertTrue(torch.equal(value, planned.state[right][key]))

    def test_replaced_memory_lives_until_the_fence(self):
        model = nn.Linear(2000, 2000)
        expected = model.weight.detach().clone()
        with self.open(model=model) as ckpt:
            for step in range(1, 6):
                self.assertTrue(ckpt.save(step))
                for parameter in model.parameters():
                    parameter.data = torch.zeros_like(parameter)
                gc.collect()
                ckpt.fence()
                model.weight.data = expected.clone()
            self.assertTrue(ckpt.wait("local"))
            for step in range(1, 6):
                model.weight.data.zero_()
                ckpt.restore(step)
                self.assertTrue(torch.equal(model.weight, expected), step)

    def test_conversion_and_a_choice(self):
        model = nn.Linear(50, 60)
        with self.open(model=model) as ckpt:
            ckpt.save(1)
            ckpt.wait("local")
        live = nn.Linear(50, 60).to(torch.bfloat16)
        before = live.bias.detach().clone()
        with self.open(model=live) as ckpt:
            with self.assertRaisesRegex(ckptd.RestoreMismatch, "stored as f32, here bf16"):
                ckpt.restore()
            ckpt.restore(convert=True, only="model/weight")
        self.assertTrue(torch.equal(live.weight, model.weight.to(torch.bfloat16)))
        self.assertTrue(torch.equal(live.bias, before))


if __name__ == "__main__":
    unittest.main()
