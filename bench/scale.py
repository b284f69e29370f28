# SPDX-License-Identifier: Apache-2.0
"""many shards, many versions

Protecting 100,000 shards includes the first save, which registers them; it is compared with making and keeping as many
names. So are 100,000 by each of ten clients at the same time, with what the daemon's memory beside the pool grows by. Opening a job of 1,000 versions with 16 parts each is compared with listing the same directories; cold
means that the kernel has forgotten them.
"""

import os
import pathlib
import shutil
import tempfile
import time

from harness import CAPTURED, MIB, Actor

SHARDS, VERSIONS, PARTS, CLIENTS = 100_000, 1000, 16, 10


def shards(bench):
    pairs = []
    for number in range(bench.repeats):
        with bench.daemon(f"shards-{number}", "256M") as daemon, bench.actor(daemon) as actor:
            actor.open("shards")
            actor("memory", "shared", "compressible", 16 * MIB, SHARDS)
            names = actor("names")["names_ns"]
            ours = actor("protect")["protect_ns"] + actor("save", 0, CAPTURED, 0)["save_ns"]
            pairs.append((ours / 1e9, names / 1e9))
    bench.book.time(f"protect and register {SHARDS} shards", pairs, "names", limit=1)


def a_million(bench):
    count = SHARDS // 10 if bench.quick else SHARDS
    pairs, memory = [], []
    for number in range(bench.repeats):
        with bench.daemon(f"million-{number}", "256M") as daemon:
            before = daemon.own_memory()
            actors = [Actor(bench, daemon.socket) for _ in range(CLIENTS)]
            for client, actor in enumerate(actors):
                actor.open(f"shards-{client}")
                actor("memory", "shared", "compressible", 16 * MIB, count)
            names = sum(actor("names")["names_ns"] for actor in actors)
            start = time.monotonic()
            for actor in actors:
                actor.tell("protect")
            for actor in actors:
                actor.answer()
            for actor in actors:
                actor.tell("save", 0, CAPTURED, 0)
            for actor in actors:
                actor.answer()
            pairs.append((time.monotonic() - start, names / 1e9))
            memory.append((daemon.own_memory() - before) * MIB / (CLIENTS * count))
            for actor in actors:
                actor.end()
    bench.book.time(f"protect and register {CLIENTS * count} shards, {CLIENTS} clients", pairs, "names", limit=15)
    bench.book.count("memory beside the pool, per shard", memory, 1024, "bytes")


def listing(root):
    start = time.monotonic()
    for _ in os.walk(root):
        pass
    return time.monotonic() - start


def make_versions(bench, daemon, count):
    actors = [Actor(bench, daemon.socket) for _ in range(PARTS)]
    for rank, actor in enumerate(actors):
        actor.tell("open", "versions", rank, PARTS, "maker")
    for actor in actors:
        actor.answer()
        actor("memory", "shared", "compressible", 4096, 1)
        actor("protect")
    for actor in actors:
        actor.tell("steps", 0, count)
    for actor in actors:
        actor.answer()
    for actor in actors:
        actor.end()


def versions(bench):
    """They are made in memory, where syncs cost nothing, and copied to the disk."""
    count = VERSIONS // 10 if bench.quick else VERSIONS
    options = {"tier_options": f"keep = {2 * VERSIONS}", "options": "log_level = warning"}
    disk, bench.scratch = bench.scratch, pathlib.Path(tempfile.mkdtemp(prefix="ckptd-bench.", dir="/dev/shm"))
    try:
        with bench.daemon("maker", "64M", **options) as maker:
            make_versions(bench, maker, count)
            maker.stop()
            shutil.copytree(maker.tiers["local"], disk / "versions")
    finally:
        shutil.rmtree(bench.scratch)
        bench.scratch = disk
    with bench.daemon("open", "64M", **options) as daemon:
        daemon.stop()
        root = daemon.tiers["local"]
        root.rmdir()
        (disk / "versions").rename(root)
        for state in ("warm", "cold"):
            pairs = []
            for number in range(bench.repeats):
                if state == "cold":
                    bench.drop_caches()
                floor = listing(root)
                if state == "cold":
                    bench.drop_caches()
                daemon.start()
                with bench.actor(daemon) as actor:
                    pairs.append((actor.open("versions", world=1, run=f"{state}-{number}")["open_ns"] / 1e9, floor))
                daemon.stop()
            bench.book.time(f"open a job of {count} versions, {PARTS} parts, {state}", pairs, "listing", limit=1)


def run(bench):
    shards(bench)
    a_million(bench)
    versions(bench)
