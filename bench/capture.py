# SPDX-License-Identifier: Apache-2.0
"""how fast memory is copied into the pool, with digests

From `save` to the end of its fence, pages of 4 KiB that were touched before, against one memcpy of the same bytes by one
thread into touched memory: with one capture thread, and with as many as are the default. After a fork the daemon reads /proc/PID/mem, since
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


def both(bench, kind, size, floors):
    """With one capture thread, then with as many as the daemon takes by itself."""
    growth = None
    for threads, floor in zip(("one thread", "default"), floors):
        options = "capture_threads = 1" if threads == "one thread" else ""
        with bench.daemon(f"{kind}-{threads}", 2 * size, options=options) as daemon, bench.actor(daemon) as actor:
            actor.open(kind)
            actor("memory", kind, "noise", size, 64)
            actor("target", size, 64)
            actor("protect")
            for warm in range(2):  # touches the pool
                actor("save", warm, CAPTURED, 0)
            daemon.settle()
            name = f"capture, {kind}, {size // MIB} MiB, {threads}"
            bench.book.speed(name, measure(bench, actor, 10), "memcpy", floor)
            if kind == "private" and threads == "default":
                actor("fork")
                before = private_bytes(actor.pid)
                actor("save", 100, CAPTURED, 0)
                growth = private_bytes(actor.pid) - before
                actor("copy")  # the target's pages are shared with the child, too: now they are not
                bench.book.speed("capture, private, after a fork", measure(bench, actor, 200), "memcpy")
    return growth


def run(bench):
    size = bench.size(GIB, 4)
    both(bench, "shared", size, (0.75, 0.75))
    growth = both(bench, "private", size, (None, 0.5))
    bench.book.count("growth of the program after a fork and a capture", [growth / MIB], 1, "MiB")
