# SPDX-License-Identifier: Apache-2.0
"""64 clients that save at the same moment

16 MiB each, all ranks of one job, against one client with as many bytes in all: how much of its rate is left, and
how much longer than the median the last one waits for its fence. Capture threads as the daemon chooses them.
"""

import statistics
import time

from harness import CAPTURED, MIB, Actor

CLIENTS, SIZE = 64, 16 * MIB


def run(bench):
    clients = CLIENTS // 4 if bench.quick else CLIENTS
    total = clients * SIZE
    with bench.daemon("clients", 2 * total + 256 * MIB) as daemon:
        alone = Actor(bench, daemon.socket)
        alone.open("alone")
        alone("memory", "shared", "noise", total, clients)
        alone("protect")
        actors = [Actor(bench, daemon.socket) for _ in range(clients)]
        for rank, actor in enumerate(actors):
            actor.open("together", rank, clients)
            actor("memory", "shared", "noise", SIZE, 1)
            actor("protect")
        for step in range(2):  # touches the pool
            for actor in [alone, *actors]:
                actor("save", step, CAPTURED, 0)
        daemon.settle()
        rates, unfair = [], []
        for step in range(2, 2 + bench.repeats):
            one = alone("save", step, CAPTURED, 0)["captured_ns"] / 1e9
            start = time.monotonic_ns() + 50_000_000
            for actor in actors:
                actor.tell("save", step, CAPTURED, 0, start)
            answers = [actor.answer() for actor in actors]
            ends = [answer["start"] + answer["captured_ns"] - start for answer in answers]
            rates.append((max(ends) / 1e9, one))
            unfair.append((max(ends) / 1e9, statistics.median(ends) / 1e9))
        bench.book.speed(f"{clients} clients, {SIZE // MIB} MiB each, sum", rates, "one client", 0.7)
        bench.book.time("captured last, by median", unfair, "median", 3)
        for actor in [alone, *actors]:
            actor.end()
