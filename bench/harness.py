# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: a daemon, programs that use it, fio, and the book of figures."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import statistics
import subprocess
import time

MIB, GIB = 1 << 20, 1 << 30
CAPTURED, LOCAL, GLOBAL = 1, 2, 4
CHUNK = 4 * MIB
DEPTH = 8  # chunks in flight, of a tier and of fio


class Failure(Exception):
    """A benchmark could not be run."""


class Unavailable(Exception):
    """A benchmark needs what this machine lacks."""


class Book:
    """Figures, as they come: a line each on the terminal, and in the file."""

    def __init__(self, path):
        self.file = open(path, "w", encoding="ascii")
        self.figures = []
        self.benchmark = ""

    def note(self, text):
        print(f"   {text}", flush=True)

    def _enter(self, name, samples, verdict, bound, **more):
        ordered = sorted(samples)
        entry = {
            "benchmark": self.benchmark,
            "figure": name,
            "median": statistics.median(ordered),
            "low": ordered[0],
            "high": ordered[-1],
            "samples": samples,
            "bound": bound,
            "verdict": verdict,
            **more,
        }
        self.figures.append(entry)
        self.file.write(json.dumps(entry) + "\n")
        self.file.flush()
        print(f"   {row(entry)}", flush=True)

    def speed(self, name, pairs, against, floor=None):
        """Pairs (our seconds, the other's seconds) for the same work: our speed as a part of the other's."""
        ratios = [other / ours for ours, other in pairs]
        good = floor is None or statistics.median(ratios) >= floor
        bound = "" if floor is None else f">= {floor}"
        self._enter(name, ratios, verdict(floor is not None, good), bound, **sides(pairs, against))

    def time(self, name, pairs, against, ceiling=None, limit=None):
        """Pairs as above: how long we take, in units of the other's time. `limit`: of our own seconds."""
        ratios = [ours / other for ours, other in pairs]
        bounds, good = [], True
        if ceiling is not None:
            bounds.append(f"<= {ceiling}")
            good = statistics.median(ratios) <= ceiling
        if limit is not None:
            bounds.append(f"< {seconds(limit)}")
            good = good and statistics.median(ours for ours, _ in pairs) < limit
        self._enter(name, ratios, verdict(bool(bounds), good), " ".join(bounds), **sides(pairs, against))

    def count(self, name, values, ceiling, unit):
        """What is counted, not compared."""
        good = ceiling is None or max(values) <= ceiling
        bound = "" if ceiling is None else f"<= {ceiling} {unit}"
        self._enter(name, values, verdict(ceiling is not None, good), bound, unit=unit)


def verdict(bounded, good):
    return ("pass" if good else "below") if bounded else "-"


def sides(pairs, against):
    return {
        "ours_s": statistics.median(ours for ours, _ in pairs),
        "other_s": statistics.median(other for _, other in pairs),
        "against": against,
    }


def seconds(value):
    for unit, scale in (("s", 1), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def row(entry):
    spread = f"{entry['low']:.3g} .. {entry['high']:.3g}"
    measured = f"{entry['median']:8.3g}  {spread:18} {entry['bound']:18} {entry['verdict']:5}"
    detail = entry.get("unit", "")
    if "against" in entry:
        detail = f"{seconds(entry['ours_s'])}; {entry['against']} {seconds(entry['other_s'])}"
    return f"{entry['figure']:46} {measured}  {detail}"


class Actor:
    """One bench-actor process."""

    def __init__(self, bench, socket_path, wrapper=()):
        environment = {**os.environ, "CKPT_SOCKET": str(socket_path)}
        self.process = subprocess.Popen(
            [*wrapper, bench.build / "bench/bench-actor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    @property
    def pid(self):
        return self.process.pid

    def tell(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise Failure(f"an actor ended with status {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise Failure(answer["error"])
        return answer

    def __call__(self, *words):
        self.tell(*words)
        return self.answer()

    def open(self, job, rank=0, world=1, run="run"):
        return self("open", job, rank, world, run)

    def end(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


class Daemon:
    """A ckptd in the foreground, with tiers in the benchmark's directory."""

    def __init__(self, bench, name, pool, tiers=("local",), loop="auto", options="", tier_options=""):
        self.bench, self.directory = bench, bench.scratch / name
        self.directory.mkdir(mode=0o700)
        self.socket = self.directory / "sock"
        self.tiers = {role: self.directory / role for role in tiers}
        text = f"[daemon]\nloop = {loop}\n{options}\n[pool]\nsize = {pool}\n"
        for role, path in self.tiers.items():
            text += f"[tier {role}]\nrole = {role}\npath = {path}\ndepth = {DEPTH}\n{tier_options}\n"
        self.configuration = self.directory / "ckptd.conf"
        self.configuration.write_text(text)
        self.process = None
        self.start()

    @property
    def pid(self):
        return self.process.pid

    def start(self):
        with open(self.directory / "log", "ab") as log:
            self.process = subprocess.Popen(
                [self.bench.build / "daemon/ckptd", "--config", self.configuration, "--socket", self.socket], stderr=log
            )
        deadline = time.monotonic() + 30
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
                if probe.connect_ex(str(self.socket)) == 0:
                    break
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise Failure("the daemon did not start:\n" + (self.directory / "log").read_text()[-2000:])
            time.sleep(0.01)
        self.settle()

    def settle(self):
        """Waits until it has nothing to do: the pool's memory has been touched, say."""
        before, still = None, 0
        while still < 3:
            time.sleep(0.1)
            ticks = pathlib.Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
            still = still + 1 if ticks == before else 0
            before = ticks

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()

    def restart(self):
        """A daemon with nothing in memory."""
        self.stop()
        self.start()

    def memory(self):
        """Kilobytes resident, by kind."""
        text = pathlib.Path(f"/proc/{self.pid}/status").read_text()
        return {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines() if line.startswith("Rss")}

    def own_memory(self):
        """MiB resident beside the pool."""
        memory = self.memory()
        return (memory["RssAnon"] + memory["RssFile"]) / 1024

    def processor_time(self):
        """Seconds, of all its threads."""
        ticks = pathlib.Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.directory)


class Bench:
    """What a benchmark gets: where things are, how large they may be, and the book."""

    def __init__(self, build, scratch, book, quick):
        self.build, self.scratch, self.book, self.quick = build, scratch, book, quick

    @property
    def repeats(self):
        return 3 if self.quick else 5

    def size(self, wanted, copies_in_memory, copies_on_disk=0):
        """`wanted` bytes, or what memory and disk have room for."""
        if self.quick:
            wanted //= 8
        with open("/proc/meminfo", encoding="ascii") as file:
            available = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
        fits = available * 3 // 4 // copies_in_memory
        if copies_on_disk:
            fits = min(fits, shutil.disk_usage(self.scratch).free * 3 // 4 // copies_on_disk)
        if fits >= wanted:
            return wanted
        scaled = max(fits // (64 * MIB) * 64 * MIB, 64 * MIB)
        self.book.note(f"scaled down from {wanted // MIB} MiB to {scaled // MIB} MiB: memory or disk is short")
        return scaled

    @contextlib.contextmanager
    def daemon(self, name, pool, **more):
        daemon = Daemon(self, name, pool, **more)
        try:
            yield daemon
        finally:
            daemon.end()

    @contextlib.contextmanager
    def actor(self, daemon, wrapper=()):
        actor = Actor(self, daemon.socket, wrapper)
        try:
            yield actor
        finally:
            actor.end()

    def fio(self, rw, size, path):
        """Seconds that fio takes for the same I/O that the daemon does: O_DIRECT, the same block and depth."""
        if not shutil.which("fio"):
            raise Unavailable("fio is not installed")
        command = ["fio", "--name=floor", f"--filename={path}", f"--rw={rw}", f"--size={size}", f"--bs={CHUNK}"]
        command += ["--direct=1", f"--iodepth={DEPTH}", "--thread", "--output-format=json"]
        command += ["--end_fsync=1", "--refill_buffers", "--fallocate=native"] if rw == "write" else ["--readonly"]
        for engine in ("io_uring", "libaio"):
            ran = subprocess.run([*command, f"--ioengine={engine}"], capture_output=True, text=True)
            if ran.returncode == 0:
                break
        else:
            raise Failure(f"fio: {ran.stderr or ran.stdout}")
        if rw == "write":
            os.unlink(path)
        return json.loads(ran.stdout)["jobs"][0]["job_runtime"] / 1e3

    def drop_caches(self, *directories):
        """Makes the page cache forget the files in these directories, and if root may, everything else."""
        os.sync()
        for directory in directories:
            for path in pathlib.Path(directory).rglob("*"):
                if path.is_file():
                    fd = os.open(path, os.O_RDONLY)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(fd)
        with contextlib.suppress(OSError):
            pathlib.Path("/proc/sys/vm/drop_caches").write_text("3")
