# SPDX-License-Identifier: Apache-2.0
"""how fast versions reach storage

From `save` until durable, capture and digests included, of bytes that do not compress, against fio writing as many
bytes with O_DIRECT and io_uring, the same block and depth, and a sync at the end, in the same directory. What it costs:
the daemon's processor time, against that of one memcpy of the bytes, and its system calls, counted by strace.
"""

import re
import shutil
import signal
import subprocess
import time

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


def system_calls(daemon, actor, step):
    """Of all its threads, from a save until it is durable."""
    path = daemon.directory / "trace"
    tracer = subprocess.Popen(["strace", "-f", "-c", "-o", path, "-p", str(daemon.pid)], stderr=subprocess.PIPE, text=True)
    tracer.stderr.readline()  # "attached"
    time.sleep(1)
    actor("save", step, LOCAL, LOCAL)
    tracer.send_signal(signal.SIGINT)
    tracer.communicate()
    total = re.search(r"^100\.00 +\S+ +\S+ +(\d+) ", path.read_text(), re.MULTILINE)
    return int(total.group(1)) if total else None


def cost(bench, size):
    """Per GiB that goes from the program to the local tier."""
    with bench.daemon("cost", size + 256 * MIB, tier_options="keep = 1\ntrash_grace_s = 0") as daemon:
        with bench.actor(daemon) as actor:
            actor.open("cost")
            actor("memory", "shared", "noise", size, 64)
            actor("target", size, 64)
            actor("protect")
            actor("save", 0, LOCAL, LOCAL)
            pairs = []
            for step in range(1, 1 + bench.repeats):
                daemon.settle()
                before, copy = daemon.processor_time(), actor("copy")["copy_ns"] / 1e9
                actor("save", step, LOCAL, LOCAL)
                daemon.settle()
                pairs.append(((daemon.processor_time() - before) * GIB / size, copy * GIB / size))
            bench.book.time("processor time per GiB, host to local", pairs, "memcpy")
            calls = system_calls(daemon, actor, 100) if shutil.which("strace") else None
            if calls is not None:
                bench.book.count("system calls per GiB, host to local", [calls * GIB / size], None, "calls")


def run(bench):
    size = bench.size(2 * GIB, 2, 4)
    measure(bench, "host to local", ["local"], size, 1, floor=0.95)
    measure(bench, "local and parallel at once, sum", ["local", "parallel"], size // 2, 2, floor=0.9)
    measure(bench, "time to GLOBAL, parallel only", ["parallel"], size // 2, 1, ceiling=1.15)
    cost(bench, size // 2)
