# SPDX-License-Identifier: Apache-2.0
"""Several ranks with torch.distributed (gloo), through the real daemon."""
import importlib.util
import os
import tempfile
import unittest

import paths
import support
from test_daemon import run

if paths.HAVE_TORCH:
    import torch

HAVE_GROUP = paths.HAVE_TORCH and torch.distributed.is_available() and hasattr(torch.distributed, "ProcessGroupGloo")
HAVE_DTENSOR = HAVE_GROUP and importlib.util.find_spec("torch.distributed._tensor") is not None

START = """
    import os, sys, torch, ckptd
    import torch.distributed as dist
    rank, world, rendezvous, action = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + rendezvous, rank=rank, world_size=world)
"""

REPLICATED = START + """
    torch.manual_seed(0 if action == "save" else 1)
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)

    class Loader:
        position = -1
        def state_dict(self):
            return {"position": self.position}
        def load_state_dict(self, state):
            self.position = state["position"]

    loader = Loader()
    with ckptd.Checkpointer("ddp", model=model, optimizer=optimizer, loader=loader) as ckpt:
        assert (ckpt.info.rank, ckpt.info.world) == (rank, world)
        if action == "save":
            model(torch.ones(2, 100)).sum().backward()
            optimizer.step()
            loader.position = 10 + rank
            assert ckpt.save(1) and ckpt.wait("local", timeout=60)
            # Only the first rank stores what all have.
            assert (ckpt.info.image_size > 100000) == (rank == 0), ckpt.info
        else:
            assert ckpt.restore() == 1
    dist.barrier()
    print(loader.position, model.weight.double().sum().item().hex(),
          optimizer.state[model.weight]["exp_avg"].double().sum().item().hex())
"""

SHARDED = START + """
    from torch.distributed._tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
    mesh = init_device_mesh("cpu", (world,))
    full = {"rows": torch.arange(70.0).reshape(10, 7), "columns": torch.arange(21.0).reshape(3, 7), "all": torch.ones(3)}
    places = {"rows": Shard(0), "columns": Shard(1), "all": Replicate()}
    model = torch.nn.Module()
    for name, value in full.items():
        value = value if action == "save" else torch.zeros_like(value)
        setattr(model, name, torch.nn.Parameter(distribute_tensor(value, mesh, [places[name]])))
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9, foreach=False)
    with ckptd.Checkpointer("dtensor", model=model, optimizer=optimizer) as ckpt:
        if action == "save":
            for parameter in model.parameters():
                optimizer.state[parameter]["momentum_buffer"] = parameter.detach() * 2
            assert ckpt.save(1) and ckpt.wait("local", timeout=60)
        else:
            assert ckpt.restore() == 1
            for name, value in full.items():
                parameter = getattr(model, name)
                assert torch.equal(parameter.full_tensor(), value), (name, parameter.full_tensor())
                moment = optimizer.state[parameter]["momentum_buffer"]
                assert isinstance(moment, DTensor) and torch.equal(moment.full_tensor(), value * 2), name
    dist.barrier()
"""


@unittest.skipUnless(HAVE_GROUP, "torch.distributed is not available")
class Ranks(support.WithDaemon):
    def together(self, program, world, action):
        with tempfile.TemporaryDirectory() as directory:
            rendezvous = os.path.join(directory, "group")
            processes = [run(self.daemon, program, rank, world, rendezvous, action) for rank in range(world)]
            done = [(process.communicate(timeout=120), process.returncode) for process in processes]
            self.assertEqual([code for _, code in done], [0] * world, "\n".join(error for (_, error), _ in done))
            return [out for (out, _), _ in done]

    def test_replicated_modules(self):
        saved = self.together(REPLICATED, 2, "save")
        self.assertEqual([line.split()[0] for line in saved], ["10", "11"])
        self.assertEqual(self.together(REPLICATED, 2, "load"), saved)
        self.assertEqual(self.together(REPLICATED, 1, "load"), saved[:1])
        grown = self.together(REPLICATED, 3, "load")
        self.assertEqual(grown[:2], saved)
        self.assertEqual(grown[2].split(), ["-1"] + saved[0].split()[1:])

    @unittest.skipUnless(HAVE_DTENSOR, "this torch has no DTensor")
    def test_dtensors_on_another_number_of_ranks(self):
        self.together(SHARDED, 2, "save")
        for world in (1, 2, 3):
            with self.subTest(world=world):
                self.together(SHARDED, world, "load")


if __name__ == "__main__":
    unittest.main()
