# SPDX-License-Identifier: Apache-2.0
"""how fast a version comes back

Into touched memory, all bytes verified. From the host tier against memcpy; from the local tier, with nothing of it
cached, against fio reading the same file with O_DIRECT, the same block and depth. "Fresh" is a daemon that has
just started, whose pool has not been touched; "used" one whose pool is smaller than the version, so that nothing
of the last restore helps the next. The first tensor also of a version of 16 GiB: of memory that the program has hardly
touched, so that it is zeros, which take 0.4 % of the room with codec = lz4; the tables are those of 16 GiB all the same.
"""

import os
import time

from harness import GIB, LOCAL, MIB

SHARDS = 1000
PAUSE = 1.0  # seconds before each of two that are compared, so that both find the disk rested


def saved(bench, daemon, size):
    with bench.actor(daemon) as actor:
        actor.open("restore", run="writer")
        actor("memory", "shared", "noise", size, SHARDS)
        actor("protect")
        actor("save", 1, LOCAL, LOCAL)
        actor("target", size, SHARDS)
        pairs = []
        for _ in range(bench.repeats):
            copy = actor("copy")["copy_ns"] / 1e9
            pairs.append((actor("restore", SHARDS)["restore_ns"] / 1e9, copy))
    return pairs


def reader(bench, daemon, size, shards, number):
    """A program that starts anew and resumes."""
    with bench.actor(daemon) as actor:
        actor("target", size, SHARDS)
        actor.open("restore", run=f"reader-{number}")
        return actor("restore", shards)["restore_ns"] / 1e9


def first_of_a_large_one(bench):
    size = 16 * GIB // (8 if bench.quick else 1)
    with bench.daemon("large", GIB, tier_options="codec = lz4\nkeep = 1") as daemon:
        with bench.actor(daemon) as actor:
            actor.open("restore", run="writer")
            actor("memory", "untouched", "nothing", size, SHARDS)
            actor("protect")
            actor("save", 1, LOCAL, LOCAL)
        times = []
        for number in range(bench.repeats):
            daemon.restart()
            bench.drop_caches(daemon.tiers["local"])
            with bench.actor(daemon) as actor:
                actor("target", size, SHARDS, "untouched")
                actor.open("restore", run=f"reader-{number}")
                listing = listed(daemon.tiers["local"])
                times.append((actor("restore", 1)["restore_ns"] / 1e9, listing))
        bench.book.time(f"first tensor of {size // GIB} GiB, local tier", times, "listing", limit=20e-3)


def listed(root):
    start = time.monotonic()
    for _ in os.walk(root):
        pass
    return time.monotonic() - start


def run(bench):
    size = bench.size(2 * GIB, 4, 2)
    with bench.daemon("restore", size + 256 * MIB) as daemon:
        bench.book.speed(f"restore from the host tier, {size // MIB} MiB", saved(bench, daemon, size), "memcpy", 0.8)
        (part,) = daemon.tiers["local"].rglob("*.safetensors")

        def cold():
            daemon.restart()
            bench.drop_caches(daemon.tiers["local"])

        fresh, first, tenth = [], [], []
        for number in range(bench.repeats):
            cold()
            floor = bench.fio("read", part.stat().st_size // (4 * MIB) * 4 * MIB, part)
            full = reader(bench, daemon, size, SHARDS, 3 * number)
            fresh.append((full, floor))
            cold()
            tenth.append((reader(bench, daemon, size, SHARDS // 10, 3 * number + 1), full))
            cold()
            first.append((reader(bench, daemon, size, 1, 3 * number + 2), floor))
        bench.book.speed("restore from the local tier, fresh", fresh, "fio", 0.9)
        bench.book.time("first tensor from the local tier", first, "fio, all", limit=20e-3)
        bench.book.time("one tenth of the tensors", tenth, "all of them", 0.15)

        text = daemon.configuration.read_text().replace(f"size = {size + 256 * MIB}", f"size = {size // 4}")
        daemon.configuration.write_text(text)
        cold()
        used = []
        with bench.actor(daemon) as actor:
            actor("target", size, SHARDS)
            actor.open("restore", run="reader")
            actor("restore", SHARDS)
            sides = [lambda: actor("restore", SHARDS)["restore_ns"] / 1e9,
                     lambda: bench.fio("read", part.stat().st_size // (4 * MIB) * 4 * MIB, part)]
            for number in range(2 * bench.repeats):
                times = [0.0, 0.0]
                for side in (0, 1) if number % 2 else (1, 0):  # a disk may be faster after a pause, for a while
                    bench.drop_caches(daemon.tiers["local"])
                    time.sleep(PAUSE)
                    times[side] = sides[side]()
                used.append(tuple(times))
        bench.book.speed("restore from the local tier, used", used, "fio", 0.9)
    first_of_a_large_one(bench)
