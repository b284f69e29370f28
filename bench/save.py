# SPDX-License-Identifier: Apache-2.0
"""how long `save` blocks the program

Saves of a protected set, without eager shards, to CAPTURED only. Before each there is one message over a socket of
the same kind to a process that is asleep, whose sending is what a save costs at least. The more was copied before, the
colder are caches and processors, for both; in units of the message the time must not depend on how much is saved.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys

from harness import CAPTURED, GIB, MIB

LIMIT = 50e-6
TENSORS = 10_000


def measure(bench, size, shards, pool):
    with bench.daemon(f"save-{size}-{shards}", pool) as daemon, bench.actor(daemon) as actor:
        actor("pinger")
        actor.open("save")
        actor("memory", "shared", "compressible", size, shards)
        actor("protect")
        actor("save", 0, CAPTURED, CAPTURED)
        pairs = []
        for step in range(1, 1 + 4 * bench.repeats):
            message = actor("ping")["send_ns"]
            pairs.append((actor("save", step, CAPTURED, 0)["save_ns"] / 1e9, message / 1e9))
        return pairs


def python(bench, kind):
    """The same of the Python package: 10,000 tensors, whose objects are looked through at each save."""
    with bench.daemon(f"save-{kind}", "256M") as daemon:
        environment = {
            **os.environ,
            "CKPT_SOCKET": str(daemon.socket),
            "PYTHONPATH": str(pathlib.Path(__file__).resolve().parent.parent / "client/python"),
            "CKPT_LIBRARY": str(bench.build / "client/libckpt.so"),
        }
        command = [sys.executable, __file__, kind, str(4 * bench.repeats)]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        bench.book.note(f"Python, {kind}: left out: " + (ran.stderr.strip().splitlines() or ["no reason"])[-1])
        return None
    return json.loads(ran.stdout)


def run(bench):
    large = bench.size(2 * GIB, 2)
    pool = large + 256 * MIB
    sizes = [(f"{size // MIB} MiB, {shards} shard{'s' * (shards > 1)}", size, shards)
             for size in (MIB, large) for shards in (1, TENSORS)]
    medians, ratios = {}, []
    for name, size, shards in sizes:
        pairs = measure(bench, size, shards, pool)
        bench.book.time(f"save, {name}", pairs, "a message", limit=LIMIT)
        medians[name] = statistics.median(ours for ours, _ in pairs)
        ratios.append(statistics.median(ours / message for ours, message in pairs))
    bench.book.count("save, slowest by fastest, in messages", [max(ratios) / min(ratios)], 2, "times")
    c = medians[sizes[1][0]]
    for kind, what in (("numpy", "numpy arrays in a dict"), ("torch", "torch tensors in a dict"),
                       ("module", "parameters of a torch module")):
        times = python(bench, kind)
        if times:
            bench.book.time(f"save in Python, {TENSORS} {what}", [(ours, c) for ours in times], "C")
            bench.book.count("   that is, per tensor", [ours / TENSORS * 1e6 for ours in times], None, "us")


def tensors(kind):
    """10,000 of 26 numbers each."""
    import ckptd

    if kind == "numpy":
        import numpy

        return ckptd.fenced({f"layers.{i}.weight": numpy.zeros(26, dtype=numpy.float32) for i in range(TENSORS)})
    import torch

    if kind == "torch":
        return ckptd.fenced({f"layers.{i}.weight": torch.zeros(26) for i in range(TENSORS)})
    return torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(26)) for _ in range(TENSORS))


def main():
    import time

    import ckptd

    with ckptd.Checkpointer("python", state=tensors(sys.argv[1])) as ckpt:
        times = []
        for step in range(int(sys.argv[2])):
            start = time.perf_counter()
            ckpt.save(step, to="CAPTURED")
            times.append(time.perf_counter() - start)
            ckpt.fence()
    print(json.dumps(times[1:]))


if __name__ == "__main__":
    main()
