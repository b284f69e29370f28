# SPDX-License-Identifier: Apache-2.0
"""how fast memory is copied into the pool, with digests

From `save` to the end of its fence, one capture thread, pages of 4 KiB that were touched before, against one memcpy of
the same bytes by one thread into touched memory. After a fork the daemon reads /proc/PID/mem, since
process_vm_readv would un-share the pages that the child still has: the program's private memory must not grow.
"""

import pathlib

from harness import CAPTURED, GIB, MIB


def private_bytes(pid):
    text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Private_"))


def measure(bench, actor, first):
    pairs = []
    for step in range(first, first + bench.repeats):
        copy = actor("copy")["copy_ns"]
        pairs.append((actor("save", step, CAPTURED, 0)["captured_ns"] / 1e9, copy / 1e9))
    return pairs


def run(bench):
    size = bench.size(GIB, 4)
    growth = None
    for kind, floor in (("shared", 0.75), ("private", 0.5)):
        with bench.daemon(kind, 2 * size, options="capture_threads = 1") as daemon, bench.actor(daemon) as actor:
            actor.open(kind)
            actor("memory", kind, "noise", size, 64)
            actor("target", size, 64)
            actor("protect")
            for warm in range(2):  # touches the pool
                actor("save", warm, CAPTURED, 0)
            daemon.settle()
            bench.book.speed(f"capture, {kind}, {size // MIB} MiB", measure(bench, actor, 10), "memcpy", floor)
            if kind == "private":
                actor("fork")
                before = private_bytes(actor.pid)
                actor("save", 100, CAPTURED, 0)
                growth = private_bytes(actor.pid) - before
                actor("copy")  # the target's pages are shared with the child, too: now they are not
                bench.book.speed("capture, private, after a fork", measure(bench, actor, 200), "memcpy")
    bench.book.count("growth of the program after a fork and a capture", [growth / MIB], 1, "MiB")
