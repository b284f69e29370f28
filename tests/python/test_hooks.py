# SPDX-License-Identifier: Apache-2.0
import gc
import unittest
import warnings
import weakref

import paths
from ckptd import hooks


class Counter:
    def __init__(self):
        self.count = 0

    def bump(self):
        self.count += 1


class PlainOptimizer:
    """An optimizer as of torch 1.x: no hooks of its own."""

    def __init__(self):
        self.steps = 0

    def step(self, closure=None):
        """Steps."""
        self.steps += 1
        return closure


class PlainHooks(unittest.TestCase):
    def setUp(self):
        self.optimizer, self.counter = PlainOptimizer(), Counter()

    def test_runs_before_each_step_and_passes_arguments(self):
        hooks.hook(self.optimizer, self.counter.bump)
        self.assertEqual(self.optimizer.step(5), 5)
        self.assertEqual(self.optimizer.step(closure=6), 6)
        self.assertEqual((self.optimizer.steps, self.counter.count), (2, 2))
        self.assertEqual(self.optimizer.step.__doc__, "Steps.")

    def test_unhook_restores(self):
        undo = hooks.hook(self.optimizer, self.counter.bump)
        undo()
        undo()
        self.assertNotIn("step", vars(self.optimizer))
        self.optimizer.step()
        self.assertEqual(self.counter.count, 0)

    def test_two_callbacks_wrap_once(self):
        other = Counter()
        undo = hooks.hook(self.optimizer, self.counter.bump)
        step = self.optimizer.step
        undo_other = hooks.hook(self.optimizer, other.bump)
        self.assertEqual(self.optimizer.step, step)
        self.optimizer.step()
        undo()
        self.optimizer.step()
        undo_other()
        self.assertEqual((self.counter.count, other.count), (1, 2))
        self.assertNotIn("step", vars(self.optimizer))

    def test_an_instance_attribute_comes_back(self):
        mine = lambda: 7
        self.optimizer.step = mine
        undo = hooks.hook(self.optimizer, self.counter.bump)
        self.assertEqual(self.optimizer.step(), 7)
        self.assertEqual(self.counter.count, 1)
        undo()
        self.assertIs(self.optimizer.step, mine)

    def test_a_wrapper_around_ours_is_left_in_place(self):
        undo = hooks.hook(self.optimizer, self.counter.bump)
        inner = self.optimizer.step
        outer = lambda: inner()
        self.optimizer.step = outer
        undo()
        self.assertIs(self.optimizer.step, outer)
        self.optimizer.step()
        self.assertEqual(self.counter.count, 0)

    def test_callbacks_are_held_weakly(self):
        hooks.hook(self.optimizer, self.counter.bump)
        gone = weakref.ref(self.counter)
        del self.counter
        gc.collect()
        self.assertIsNone(gone())
        self.optimizer.step()

    def test_exceptions_pass(self):
        class Bad(Counter):
            def bump(self):
                raise KeyboardInterrupt

        bad = Bad()
        hooks.hook(self.optimizer, bad.bump)
        with self.assertRaises(KeyboardInterrupt):
            self.optimizer.step()
        self.assertEqual(self.optimizer.steps, 0)


@paths.needs_torch
class TorchHooks(unittest.TestCase):
    def setUp(self):
        import torch

        self.torch = torch
        self.parameter = torch.nn.Parameter(torch.ones(3))
        self.optimizer = torch.optim.SGD([self.parameter], lr=1.0, momentum=0.5)
        self.counter = Counter()

    def scheduler(self):
        return self.torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)

    def train(self, *schedulers, steps=3):
        """Any warning is a failure: schedulers warn when they think that step() was tampered with."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(steps):
                self.parameter.grad = self.torch.ones(3)
                self.optimizer.step()
                for scheduler in schedulers:
                    scheduler.step()

    def test_scheduler_before(self):
        scheduler = self.scheduler()
        hooks.hook(self.optimizer, self.counter.bump)
        self.train(scheduler)
        self.assertEqual(self.counter.count, 3)

    def test_scheduler_after(self):
        hooks.hook(self.optimizer, self.counter.bump)
        self.train(self.scheduler())
        self.assertEqual(self.counter.count, 3)

    def test_scheduler_before_and_after(self):
        first = self.scheduler()
        hooks.hook(self.optimizer, self.counter.bump)
        self.train(first, self.scheduler())
        self.assertEqual(self.counter.count, 3)

    def test_unhook_around_schedulers(self):
        first = self.scheduler()
        undo = hooks.hook(self.optimizer, self.counter.bump)
        second = self.scheduler()
        undo()
        self.train(first, second)
        self.assertEqual(self.counter.count, 0)
        hooks.hook(self.optimizer, self.counter.bump)
        self.train(first, second)
        self.assertEqual(self.counter.count, 3)

    def test_closures(self):
        hooks.hook(self.optimizer, self.counter.bump)

        def closure():
            self.parameter.grad = self.torch.ones(3)
            return 5

        self.assertEqual(self.optimizer.step(closure), 5)
        self.assertEqual(self.counter.count, 1)

    def test_old_way_on_this_torch(self):
        """The wrapper of torch 1.x also works where the optimizer has hooks of its own."""
        callbacks = hooks._wrap(self.optimizer)
        callbacks.append(weakref.WeakMethod(self.counter.bump))
        self.train(self.scheduler())
        self.assertEqual(self.counter.count, 3)

    def test_copies_of_the_optimizer_are_not_hooked(self):
        import copy

        hooks.hook(self.optimizer, self.counter.bump)
        other = copy.deepcopy(self.optimizer)
        other.step()
        self.assertEqual(self.counter.count, 0)


if __name__ == "__main__":
    unittest.main()
