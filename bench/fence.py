# SPDX-License-Identifier: Apache-2.0
"""what a fence costs when the capture has ended

The first fence after a capture finds its end in the shared word; later ones find nothing to wait for. Both without a
system call, which strace confirms where it is installed.
"""

import shutil
import statistics

from harness import MIB, Unavailable

LIMIT = 1e-6
COUNT = 1_000_000


def prepared(actor, job):
    actor.open(job)
    actor("memory", "shared", "compressible", MIB, 1)
    actor("protect")


def system_calls(bench, daemon):
    """Between the two marks of the actor's first fence."""
    trace = daemon.directory / "trace"
    with bench.actor(daemon, ["strace", "-o", trace, "-e", "trace=all"]) as actor:
        prepared(actor, "traced")
        actor("fence", 0, 1)
    lines = trace.read_text().splitlines()
    marks = [number for number, line in enumerate(lines) if line.startswith("getppid()")]
    if len(marks) != 2:
        raise Unavailable("strace may not trace here")
    return marks[1] - marks[0] - 1


def run(bench):
    with bench.daemon("fence", "64M") as daemon:
        with bench.actor(daemon) as actor:
            prepared(actor, "fence")
            answers = [actor("fence", step, COUNT) for step in range(3 * bench.repeats)]
        call = statistics.median(answer["call_ns"] for answer in answers) / 1e9
        first = [(max(answer["first_ns"] - answer["clock_ns"], 1) / 1e9, call) for answer in answers]
        bench.book.time("fence, the first after a capture", first, "empty call", limit=LIMIT)
        later = [(answer["fence_ns"] / 1e9, answer["call_ns"] / 1e9) for answer in answers]
        bench.book.time("fence, with nothing running", later, "empty call", limit=LIMIT)
        if not shutil.which("strace"):
            raise Unavailable("strace is not installed")
        bench.book.count("fence after a capture, system calls", [system_calls(bench, daemon)], 0, "calls")
