# SPDX-License-Identifier: Apache-2.0
"""Modules, optimizers, schedulers and tensors, on versions kept in memory (memory_handle.py)."""
import gc
import itertools
import unittest
import warnings

import paths
import ckptd
from ckptd import binding
from memory_handle import Store, without_daemon

if paths.HAVE_TORCH:
    import torch
    from torch import nn


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))


def step(model, optimizer, *schedulers):
    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(6, 4)).pow(2).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    for scheduler in schedulers:
        scheduler.step(1.0) if type(scheduler).__name__ == "ReduceLROnPlateau" else scheduler.step()


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


class WithTorch(unittest.TestCase):
    def setUp(self):
        self.store = Store()
        stand_in = without_daemon(self.store)
        stand_in.__enter__()
        self.addCleanup(stand_in.__exit__, None, None, None)

    def saved(self, number=1, **objects):
        with ckptd.Checkpointer("job", **objects) as ckpt:
            self.assertTrue(ckpt.save(number))
            ckpt.fence()
        return self.store.versions[-1]

    def restored(self, options=None, **objects):
        with ckptd.Checkpointer("job", **objects) as ckpt:
            ckpt.restore(**(options or {}))

    def assert_same_state(self, left, right, path=""):
        self.assertIs(type(left), type(right), path)
        if isinstance(left, torch.Tensor):
            self.assertEqual((left.dtype, left.shape), (right.dtype, right.shape), path)
            self.assertEqual(bits(left), bits(right), path)
        elif isinstance(left, dict):
            self.assertEqual(set(left), set(right), path)
            for key in left:
                self.assert_same_state(left[key], right[key], "%s/%s" % (path, key))
        elif isinstance(left, (list, tuple)):
            self.assertEqual(len(left), len(right), path)
            for position, (a, b) in enumerate(zip(left, right)):
                self.assert_same_state(a, b, "%s/%d" % (path, position))
        elif not callable(left):
            self.assertEqual(left, right, path)


def optimizers():
    yield "adamw", lambda p: torch.optim.AdamW(p, 1e-2)
    yield "amsgrad", lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True)
    yield "sgd", lambda p: torch.optim.SGD(p, 1e-2)
    yield "momentum", lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9)
    yield "adagrad", lambda p: torch.optim.Adagrad(p, 1e-2)
    yield "rmsprop", lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.1, centered=True)
    yield "asgd", lambda p: torch.optim.ASGD(p, 1e-2)
    yield "rprop", lambda p: torch.optim.Rprop(p, 1e-2)
    yield "nadam", lambda p: torch.optim.NAdam(p, 1e-2)
    yield "adadelta", lambda p: torch.optim.Adadelta(p, 1e-2)
    yield "lbfgs", lambda p: torch.optim.LBFGS(p, 1e-2, max_iter=3)


def schedulers():
    scheduler = torch.optim.lr_scheduler
    yield "step", lambda o: scheduler.StepLR(o, 2)
    yield "lambda", lambda o: scheduler.LambdaLR(o, lambda epoch: 0.9**epoch)
    yield "plateau", lambda o: scheduler.ReduceLROnPlateau(o, patience=1)
    yield "onecycle", lambda o: scheduler.OneCycleLR(o, max_lr=0.1, total_steps=50)
    yield "cyclic", lambda o: scheduler.CyclicLR(o, 0.001, 0.1, cycle_momentum=False)
    yield "restarts", lambda o: scheduler.CosineAnnealingWarmRestarts(o, 3)
    yield "multistep", lambda o: scheduler.MultiStepLR(o, [2, 4])
    yield "sequential", lambda o: scheduler.SequentialLR(
        o, [scheduler.ConstantLR(o, 0.1, 2), scheduler.ExponentialLR(o, 0.9)], [3]
    )
    yield "chained", lambda o: scheduler.ChainedScheduler(
        [scheduler.ConstantLR(o, 0.1, 2), scheduler.ExponentialLR(o, 0.9)]
    )


@paths.needs_torch
class Resume(WithTorch):
    def check(self, make_optimizer, make_scheduler=None):
        """Six steps at once equal three, a restore into fresh objects, and three more, bit for bit."""
        warnings.simplefilter("ignore")
        self.store.versions.clear()

        def fresh(seed):
            model = make_model(seed)
            optimizer = make_optimizer(model.parameters())
            return model, optimizer, [make_scheduler(optimizer)] if make_scheduler else []

        def objects(model, optimizer, scheduled):
            return dict(model=model, optimizer=optimizer, **{"s%d" % i: each for i, each in enumerate(scheduled)})

        model, optimizer, scheduled = fresh(1)
        with ckptd.Checkpointer("job", **objects(model, optimizer, scheduled)) as ckpt:
            for number in range(6):
                step(model, optimizer, *scheduled)
                ckpt.save(number)
        del self.store.versions[3:]
        again, other, planned = fresh(2)
        with ckptd.Checkpointer("job", **objects(again, other, planned)) as ckpt:
            self.assertEqual(ckpt.restore(), 2)
            for number in range(3, 6):
                step(again, other, *planned)
                ckpt.save(number)
        self.assert_same_state(model.state_dict(), again.state_dict())
        self.assert_same_state(optimizer.state_dict(), other.state_dict())
        for left, right in zip(scheduled, planned):
            self.assert_same_state(left.state_dict(), right.state_dict())

    def test_optimizers(self):
        for name, make in optimizers():
            with self.subTest(optimizer=name):
                self.check(make)

    def test_schedulers(self):
        for name, make in schedulers():
            with self.subTest(scheduler=name):
                self.check(lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9), make)

    def test_a_function_that_is_another_one_is_noticed(self):
        scheduler = torch.optim.lr_scheduler

        def of(function):
            optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 1e-2)
            made = scheduler.StepLR(optimizer, 1)
            made.function = function
            return made

        self.saved(s=of(gc.collect))
        self.restored(s=of(gc.collect))
        with self.assertRaisesRegex(ckptd.RestoreMismatch, "s/function: stored with gc.collect, here gc.enable"):
            self.restored(s=of(gc.enable))

    def test_scaler_and_averaged_model(self):
        from torch.optim.swa_utils import AveragedModel

        model = make_model()
        average, scaler = AveragedModel(model), torch.cuda.amp.GradScaler(enabled=False)
        average.update_parameters(model)
        version = self.saved(ema=average, scaler=scaler)
        self.assertFalse(version["tensors"]["ema/module.0.weight"][2] & binding.EAGER)
        self.assertTrue(version["tensors"]["ema/n_averaged"][2] & binding.EAGER)
        live = AveragedModel(make_model(1))
        self.restored(ema=live, scaler=scaler)
        self.assert_same_state(average.state_dict(), live.state_dict())


@paths.needs_torch
class Tensors(WithTorch):
    def test_every_dtype(self):
        kinds = [getattr(torch, name) for name in (
            "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 uint16 uint32 uint64 "
            "float8_e4m3fn float8_e5m2"
        ).split() if hasattr(torch, name)]
        objects = {}
        for kind in kinds:
            raw = torch.arange(6 * torch.empty(0, dtype=kind).element_size(), dtype=torch.uint8)
            objects[str(kind)] = (raw % 2 if kind is torch.bool else raw).view(kind).reshape(2, 3)
        self.saved(d=objects)
        live, into = {}, {key: torch.zeros_like(value) for key, value in objects.items()}
        self.restored(d=live)
        self.restored(d=into)
        for key, value in objects.items():
            self.assert_same_state(value, live[key], key)
            self.assert_same_state(value, into[key], key)

    def test_views(self):
        base = torch.arange(24.0).reshape(4, 6)
        views = {
            "transposed": base.t(), "strided": base[::2, 1::3], "slice": base[1:3], "expanded": base[:, :1].expand(4, 5),
            "scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4), "channels": torch.randn(2, 3, 4, 5).to(
                memory_format=torch.channels_last),
        }
        version = self.saved(d=views)
        self.assertEqual(len(version["tensors"]["d/slice"][3]), 48)
        live = {}
        self.restored(d=live)
        room = torch.zeros(10, 10)
        into = {key: torch.zeros_like(value) for key, value in views.items()}
        into["strided"], into["transposed"] = room[::3, ::6][:2], room[4:8, 2:8].t()
        self.assertEqual(into["strided"].shape, views["strided"].shape)
        self.restored(d=into)
        for key, value in views.items():
            self.assertTrue(torch.equal(live[key], value), key)
            self.assertTrue(torch.equal(into[key], value), key)
        self.assertTrue(torch.equal(room[4:8, 2:8].t(), base.t()))

    def test_refusals(self):
        class Wrapper(torch.Tensor):
            @staticmethod
            def __new__(cls, inner):
                return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

            @classmethod
            def __torch_dispatch__(cls, function, kinds, arguments=(), keywords=None):
                raise NotImplementedError

        for value, pattern in (
            (torch.zeros(2, device="meta"), "meta tensor"), (torch.zeros(2).to_sparse(), "sparse"),
            (torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.quint8), "quantized"),
            (torch.zeros(2, dtype=torch.complex64).conj(), "resolve_conj"),
            (Wrapper(torch.ones(2)), "Wrapper has no storage"), (nn.parameter.UninitializedParameter(), "forward pass"),
            (torch.zeros(2, dtype=torch.complex32), "complex32"),
        ):
            with self.assertRaisesRegex(TypeError, "^d/x/0: .*" + pattern):
                ckptd.Checkpointer("job", d={"x": [value]})
        with self.assertRaisesRegex(TypeError, "^m/0.weight: .*forward pass"):
            ckptd.Checkpointer("job", m=nn.Sequential(nn.LazyLinear(2)))

    def test_sharded_modules_are_refused(self):
        kind = type("FullyShardedDataParallel", (nn.Module,), {})
        with self.assertRaisesRegex(TypeError, "^m/0: FSDP"):
            ckptd.Checkpointer("job", m=nn.Sequential(kind()))

    def test_conversion(self):
        value = torch.randn(3, 4)
        self.saved(d={"x": value})
        live = torch.zeros(4, 3, dtype=torch.bfloat16).t()
        with self.assertRaisesRegex(ckptd.RestoreMismatch, "d/x: stored as f32, here bf16"):
            self.restored(d={"x": live})
        self.restored({"convert": True}, d={"x": live})
        self.assertTrue(torch.equal(live, value.to(torch.bfloat16)))


@paths.needs_torch
class Modules(WithTorch):
    def test_names_are_state_dict_keys(self):
        model = make_model()
        self.assertEqual(set(self.saved(m=model)["tensors"]), {"m/" + key for key in model.state_dict()})

    def test_parameters_are_fenced_and_buffers_eager(self):
        for name, entry in self.saved(m=make_model())["tensors"].items():
            self.assertEqual(bool(entry[2] & binding.EAGER), "running" in name or "num_batches" in name, name)

    def test_tied_weights_are_stored_once(self):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.outer = nn.Embedding(3, 4), nn.Linear(4, 3, bias=False)
                self.outer.weight = self.inner.weight

        model = Tied()
        with ckptd.Checkpointer("job", m=model) as ckpt:
            ckpt.save(1)
            self.assertEqual(len(ckpt._handle.shards), 1)
            self.assertEqual(ckpt._handle.aliases, {"m/outer.weight": "m/inner.weight"})
        live = Tied()
        self.restored(m=live)
        self.assertTrue(torch.equal(live.outer.weight, model.inner.weight))

    def test_extra_state_and_hooks(self):
        class Extra(nn.Linear):
            seen = None

            def get_extra_state(self):
                return {"calls": (1, 2), "table": torch.arange(3)}

            def set_extra_state(self, state):
                self.seen = state

        model = nn.Sequential(Extra(1, 1))
        model._register_state_dict_hook(lambda module, state, prefix, metadata: state.update(made=torch.ones(2)))
        version = self.saved(m=model)
        self.assertEqual(
            set(version["tensors"]), {"m/0.weight", "m/0.bias", "m/0._extra_state/table", "m/made"}
        )
        self.restored(m=model)
        self.assertEqual(model[0].seen["calls"], (1, 2))
        self.assertEqual(model[0].seen["table"].tolist(), [0, 1, 2])

    def test_changes_are_noticed_at_the_next_save(self):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def replace_data():
            model[0].weight.data = torch.full((8, 4), 7.0)

        def add_module():
            model.add_module("new", nn.Linear(2, 2))

        def replace_parameter():
            model[3].bias = nn.Parameter(torch.tensor([5.0, 6.0]))

        def replace_buffer():
            model[1].running_mean = torch.full((8,), 3.0)

        def drop_parameter():
            model[3].bias = None

        with ckptd.Checkpointer("job", m=model, o=optimizer) as ckpt:
            ckpt.save(0)
            for number, change in enumerate(
                (replace_data, add_module, replace_parameter, replace_buffer, model.double, drop_parameter), start=1
            ):
                ckpt.fence()
                del ckpt._handle.calls[:]
                change()
                ckpt.save(number)
                ckpt.fence()
                self.assertTrue(ckpt._handle.calls, change)
                found = self.store.versions[-1]["tensors"]
                state = model.state_dict()
                self.assertEqual({name for name in found if name[0] == "m"}, {"m/" + key for key in state})
                for key, value in state.items():
                    self.assertEqual(list(found["m/" + key][3]), bits(value), (change, key))
            ckpt.fence()
            del ckpt._handle.calls[:]
            ckpt.save(100)
            self.assertEqual(ckpt._handle.calls, [])

    def test_replaced_memory_lives_until_the_fence(self):
        model = nn.Linear(100, 100)
        expected = bits(model.weight)
        with ckptd.Checkpointer("job", m=model) as ckpt:
            ckpt.save(1)
            for parameter in model.parameters():
                parameter.data = torch.zeros_like(parameter)
            gc.collect()
            garbage = [torch.full((100, 100), 9.0) for _ in range(20)]
            ckpt.fence()
            self.assertEqual(ckpt._registry._held, [])
        del garbage
        self.assertEqual(list(self.store.versions[-1]["tensors"]["m/weight"][3]), expected)

    def test_the_hook_fences_before_parameters_change(self):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with ckptd.Checkpointer("job", m=model, o=optimizer) as ckpt:
            ckpt.save(1)
            before = bits(model[0].weight)
            mean = bits(model[1].running_mean)
            step(model, optimizer)
        self.assertNotEqual(bits(model[0].weight), before)
        self.assertEqual(list(self.store.versions[-1]["tensors"]["m/0.weight"][3]), before)
        self.assertEqual(list(self.store.versions[-1]["tensors"]["m/1.running_mean"][3]), mean)
        self.assertFalse(any("ckptd" in repr(value) for value in vars(optimizer).values()))

    def test_missing_parameters_are_named_and_nothing_changes(self):
        self.saved(m=nn.Sequential(nn.Linear(2, 2)))
        live = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
        before = bits(live[0].weight)
        with self.assertRaisesRegex(ckptd.RestoreMismatch, "m/1.weight: missing"):
            self.restored(m=live)
        self.assertEqual(bits(live[0].weight), before)
        with self.assertLogs("ckptd"):
            self.restored({"strict": False}, m=live)
        self.assertNotEqual(bits(live[0].weight), before)
        with self.assertRaisesRegex(ckptd.RestoreMismatch, "m/0.bias: stored, but unexpected"):
            self.restored(m=nn.Sequential(nn.Linear(2, 2, bias=False)))


@paths.needs_torch
class Optimizers(WithTorch):
    def test_state_is_keyed_by_parameter_names(self):
        model, loose = make_model(), nn.Parameter(torch.ones(2))
        optimizer = torch.optim.Adam(itertools.chain(model.parameters(), [loose]), 0.1)
        loose.grad = torch.ones(2)
        step(model, optimizer)
        loose.grad = torch.ones(2)
        optimizer.step()
        names = set(self.saved(m=model, o=optimizer)["tensors"])
        self.assertIn("o/state/m/0.weight/exp_avg", names)
        self.assertIn("o/state/%group0/6/exp_avg_sq", names)

    def test_moments_keep_their_dtype(self):
        parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.9)
        optimizer.state[parameter]["momentum_buffer"] = torch.tensor([1.0001, 2.0001, 3.0001])
        self.saved(o=optimizer)
        other = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        live = torch.optim.SGD([other], 0.5, momentum=0.1)
        live.state[other]["momentum_buffer"] = torch.zeros(3, dtype=torch.bfloat16)
        self.restored(o=live)
        self.assert_same_state(live.state_dict(), optimizer.state_dict())

    def test_state_that_was_not_there_yet_goes(self):
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        self.saved(m=model, o=optimizer)
        step(model, optimizer)
        self.assertTrue(optimizer.state)
        self.restored(m=model, o=optimizer)
        self.assertFalse(optimizer.state)

    def test_existing_state_is_read_in_place(self):
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        step(model, optimizer)
        self.saved(m=model, o=optimizer)
        moment = optimizer.state[model[0].weight]["exp_avg"]
        before = bits(moment)
        step(model, optimizer)
        self.restored(m=model, o=optimizer)
        self.assertIs(optimizer.state[model[0].weight]["exp_avg"], moment)
        self.assertEqual(bits(moment), before)

    def test_groups_and_order(self):
        model = make_model()
        names = [name for name, _ in model.named_parameters()]

        def make(order):
            wanted = dict(model.named_parameters())
            return torch.optim.Adam([{"params": [wanted[name] for name in order], "lr": 0.3}], 0.1)

        optimizer = make(names)
        step(model, optimizer)
        self.saved(m=model, o=optimizer)
        live = make(names[::-1])
        self.restored(m=model, o=live)
        for parameter in model.parameters():
            self.assert_same_state(live.state[parameter], optimizer.state[parameter])
        with self.assertRaisesRegex(ckptd.RestoreMismatch, "o/group/0: stored with 6 parameters, here 2"):
            self.restored(m=model, o=make(names[:2]))
        other = torch.optim.Adam([{"params": [each]} for each in model.parameters()], 0.1)
        with self.assertRaisesRegex(ckptd.RestoreMismatch, "o: stored with 1 parameter groups, here 6"):
            self.restored(m=model, o=other)

    def test_a_new_group_is_noticed(self):
        model, more = make_model(), nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        with ckptd.Checkpointer("job", m=model, n=more, o=optimizer) as ckpt:
            ckpt.save(1)
            step(model, optimizer)
            ckpt.save(2)
            optimizer.add_param_group({"params": more.parameters(), "lr": 5.0})
            for parameter in more.parameters():
                optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
            ckpt.save(3)
        names = [sorted(name for name in version["tensors"] if name[0] == "o") for version in self.store.versions]
        self.assertEqual([len(each) for each in names], [0, 6, 8])
        self.assertIn("o/state/n/weight/momentum_buffer", names[2])

    def test_renaming_a_parameter_moves_its_state(self):
        model = nn.Module()
        model.a = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([model.a], 0.1)
        optimizer.state[model.a]["momentum_buffer"] = torch.ones(2)
        with ckptd.Checkpointer("job", m=model, o=optimizer) as ckpt:
            ckpt.save(1)
            model.b = model.a
            del model.a
            ckpt.save(2)
        self.assertEqual(set(self.store.versions[-1]["tensors"]), {"m/b", "o/state/m/b/momentum_buffer"})

    def test_tensor_learning_rates_are_eager(self):
        parameter = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], 0.1)
        optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
        with ckptd.Checkpointer("job", o=optimizer) as ckpt:
            ckpt.save(1)
            optimizer.param_groups[0]["lr"].fill_(0.25)
            ckpt.fence()
        optimizer.param_groups[0]["lr"] = torch.tensor(9.0)
        self.restored(o=optimizer)
        self.assertEqual(optimizer.param_groups[0]["lr"].item(), 0.5)

    def test_names_can_be_chosen(self):
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        step(model, optimizer)
        self.saved(m=model, o=optimizer)
        fresh = make_model(1)
        other = torch.optim.Adam(fresh.parameters(), 0.7)
        before = bits(fresh[3].weight)
        self.restored({"only": ["m/0.*", "o/state/m/0.*/exp_avg"]}, m=fresh, o=other)
        self.assertEqual(bits(fresh[0].weight), bits(model[0].weight))
        self.assertEqual(bits(fresh[3].weight), before)
        self.assertEqual(set(other.state), {fresh[0].weight, fresh[0].bias})
        self.assertEqual(other.param_groups[0]["lr"], 0.7)


if __name__ == "__main__":
    unittest.main()
