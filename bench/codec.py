# SPDX-License-Identifier: Apache-2.0
"""lz4 against raw, and one event loop against the other

Time from `save` until LOCAL, two daemons in turns. What encoding gains depends on how slow the storage is: with a fast
local disk it loses time and saves room. `auto` must not cost more than a little anywhere, whether bytes compress or not.
"""

from harness import GIB, LOCAL, MIB

KEEP = "keep = 1\ntrash_grace_s = 0\n"


class Side:
    """A daemon and a program that saves."""

    def __init__(self, daemon, actor, data, size):
        self.daemon, self.actor, self.size = daemon, actor, size
        actor.open("codec")
        actor("memory", "shared", data, size, 16)
        actor("protect")
        self.save(0)

    def save(self, step):
        took = self.actor("save", step, LOCAL, LOCAL)["durable_ns"] / 1e9
        self.daemon.settle()
        return took

    def stored(self):
        """The part of its bytes that lies on the disk."""
        kinds = (".safetensors", ".chunks")
        files = [path for path in self.daemon.tiers["local"].rglob("rank-*") if path.suffix in kinds]
        return max(path.stat().st_size for path in files) / self.size


def pair(left, right, step):
    """Each goes first at every second step: what the one leaves to the disk, the other meets."""
    if step % 2:
        return left.save(step), right.save(step)
    theirs = right.save(step)
    return left.save(step), theirs


def compare(bench, data, size, ours, other, times=1):
    """Options of a daemon each. The pairs of times, and what our side stored."""
    pool = size + 256 * MIB
    with bench.daemon("ours", pool, **ours) as our_daemon, bench.actor(our_daemon) as our_actor:
        with bench.daemon("other", pool, **other) as other_daemon, bench.actor(other_daemon) as other_actor:
            left, right = Side(our_daemon, our_actor, data, size), Side(other_daemon, other_actor, data, size)
            pairs = [pair(left, right, step) for step in range(1, 1 + times * bench.repeats)]
            return pairs, left.stored()


def run(bench):
    size = bench.size(GIB // 2, 4, 8)
    raw = {"tier_options": KEEP}
    for data in ("compressible", "noise"):
        for codec in ("lz4", "auto"):
            encoded = {"tier_options": KEEP + f"codec = {codec}"}
            pairs, stored = compare(bench, data, size, encoded, raw, 2)
            ceiling = 1.05 if codec == "auto" or data == "noise" else None
            bench.book.time(f"{codec}, {data} bytes, stored as {stored:.0%}", pairs, "raw", ceiling)
    slow = {"tier_options": KEEP + "rate_mib_s = 200\n"}
    for codec in ("lz4", "auto"):
        encoded = {"tier_options": slow["tier_options"] + f"codec = {codec}"}
        pairs, stored = compare(bench, "compressible", size, encoded, slow)
        bench.book.time(f"{codec}, compressible bytes, a tier of 200 MiB/s, stored as {stored:.0%}", pairs, "raw", 1.05)
    pairs, _ = compare(bench, "noise", size, {**raw, "loop": "posix"}, {**raw, "loop": "uring"}, 2)
    bench.book.time("the posix loop, raw", pairs, "io_uring")
