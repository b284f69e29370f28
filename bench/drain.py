# SPDX-License-Identifier: Apache-2.0
"""how fast versions reach storage

From `save` until durable, capture and digests included, of bytes that do not compress, against fio writing as many
bytes with O_DIRECT and io_uring, the same block and depth, and a sync at the end, in the same directory.
"""

from harness import GIB, GLOBAL, LOCAL, MIB


def measure(bench, name, tiers, size, parts, floor=None, ceiling=None):
    """`parts`: how often each byte is written."""
    level = GLOBAL if "parallel" in tiers else LOCAL
    with bench.daemon(name, size + 256 * MIB, tiers=tiers, tier_options="keep = 1\ntrash_grace_s = 0") as daemon:
        with bench.actor(daemon) as actor:
            actor.open("drain")
            actor("memory", "shared", "noise", size, 64)
            actor("protect")
            actor("save", 0, level, level)
            pairs = []
            for step in range(1, 1 + bench.repeats):
                daemon.settle()
                floor_s = bench.fio("write", size, daemon.directory / "floor")
                saved = actor("save", step, level, level)
                durable = saved["durable_ns"]
                if parts > 1:
                    wait = actor("wait", step, LOCAL)
                    durable = max(durable, wait["now"] - saved["start"])
                pairs.append((durable / 1e9 / parts, floor_s))
    label = f"{name}, {size // MIB} MiB"
    if ceiling:
        bench.book.time(label, pairs, "fio", ceiling)
    else:
        bench.book.speed(label, pairs, "fio", floor)


def run(bench):
    size = bench.size(2 * GIB, 2, 4)
    measure(bench, "host to local", ["local"], size, 1, floor=0.95)
    measure(bench, "local and parallel at once, sum", ["local", "parallel"], size // 2, 2, floor=0.9)
    measure(bench, "time to GLOBAL, parallel only", ["parallel"], size // 2, 1, ceiling=1.15)
