# SPDX-License-Identifier: Apache-2.0
"""what a daemon costs that has nothing to do

Wakeups are the voluntary context switches of all its threads in 10 s. Memory is what is resident beside the pool,
after clients have come and gone.
"""

import pathlib
import time

from harness import LOCAL, MIB

SECONDS = 10


def wakeups(pid):
    total = 0
    for status in pathlib.Path(f"/proc/{pid}/task").glob("*/status"):
        for line in status.read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                total += int(line.split()[1])
    return total


def during(pid):
    before = wakeups(pid)
    time.sleep(SECONDS)
    return wakeups(pid) - before


def run(bench):
    tiers = {"tiers": ["local", "parallel"], "tier_options": "keep = 1\ntrash_grace_s = 0"}
    with bench.daemon("idle", "256M", **tiers) as daemon:
        bench.book.count(f"wakeups in {SECONDS} s, never used", [during(daemon.pid)], 0, "wakeups")
        with bench.actor(daemon) as actor:
            actor.open("idle")
            actor("memory", "shared", "noise", 64 * MIB, 100)
            actor("protect")
            for step in range(5):
                actor("save", step, 0, LOCAL)
            daemon.settle()
            time.sleep(3)
            woken = during(daemon.pid)
            bench.book.count(f"wakeups in {SECONDS} s, a client that does nothing", [woken], None, "wakeups")
        time.sleep(3)
        bench.book.count(f"wakeups in {SECONDS} s, after its clients", [during(daemon.pid)], 0, "wakeups")
        bench.book.count("memory beside the pool", [daemon.own_memory()], 8, "MiB")
