#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kills a training run again and again, and shows that it ends where an unbroken one ends.

  1. train.py runs without ckptd: the reference.
  2. train.py runs with a checkpoint after every step, into a node-local and a parallel tier. At
     random moments, while captures and drains are in flight, it is killed with SIGKILL and started
     again; once the daemon is killed instead, and training goes on.
  3. Weights, moments, averaged weights, random states and all losses must equal the reference's bit
     for bit. The last checkpoint is read by a plain safetensors reader that knows nothing of ckptd,
     and must hold the same bytes.

Everything lies in one private directory, which is removed at the end, unless --keep.
"""

import argparse
import collections
import getpass
import hashlib
import importlib.util
import json
import os
import pathlib
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
JOB = "demo"
PATIENCE = 90  # seconds without a new step after which something is wrong

CONFIGURATION = """\
[daemon]
log_file = {directory}/ckptd.log
idle_exit_s = 30

[pool]
size = 256M

[tier nvme]
role = local
path = {directory}/local
keep = 12

[tier lustre]
role = parallel
path = {directory}/parallel
"""


class Failure(Exception):
    """The demonstration did not show what it should."""


# ---- the trainer ----


class Trainer:
    """One start of train.py."""

    def __init__(self, directory, options, environment):
        self.losses = directory / "losses.jsonl"
        self.log = directory.with_suffix(".log")
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, HERE / "train.py", "--quiet", "--out", directory, *options],
                stdout=log,
                stderr=log,
                env=environment,
            )

    def last_step(self):
        try:
            lines = self.losses.read_bytes().splitlines()
        except FileNotFoundError:
            return -1
        return json.loads(lines[-1])["step"] if lines else -1

    def wait_for(self, step):
        """Returns when that step's loss is on disk."""
        last, deadline = None, time.monotonic() + PATIENCE
        while True:
            now = self.last_step()
            if now >= step:
                return
            if now != last:
                last, deadline = now, time.monotonic() + PATIENCE
            if self.process.poll() is not None:
                raise Failure(f"the trainer ended with {self.process.returncode} before step {step}; it said:\n{self.said()}")
            if time.monotonic() > deadline:
                raise Failure(f"the trainer hangs after step {now}; it said:\n{self.said()}")
            time.sleep(0.001)

    def finish(self, steps):
        self.wait_for(steps - 1)
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise Failure(f"the trainer does not end; it said:\n{self.said()}") from None
        if code:
            raise Failure(f"the trainer ended with {code}; it said:\n{self.said()}")

    def kill(self):
        self.process.kill()
        self.process.wait()

    def said(self):
        return "".join("    " + line + "\n" for line in self.log.read_text(errors="replace").splitlines()[-15:])


def read_lines(path):
    """Lines of JSON; one that a kill has cut short is left out."""
    entries = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                entries.append(json.loads(line))
            except ValueError:
                continue
    return entries


# ---- the daemon, seen from outside ----


def daemons(directory):
    """Processes of ckptd that were started for this run directory."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if os.path.basename(os.readlink(process / "exe")) != "ckptd":
                continue
            if os.fsencode(directory) in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue  # it has just ended
    return found


def stop_daemons(directory):
    """Asks politely, then not."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + 40
        for pid in daemons(directory):
            os.kill(pid, sent)
        while daemons(directory) and time.monotonic() < deadline:
            time.sleep(0.02)
        if not daemons(directory):
            return sent == signal.SIGTERM
    return False


class Watcher(threading.Thread):
    """Looks at the tiers, and notes when a version became complete there. The time comes from the
    file system, so that it is right however seldom one looks."""

    def __init__(self, roots):
        super().__init__(daemon=True)
        self.roots = roots  # level: path
        self.complete = {level: {} for level in roots}  # level: (generation, step): (time, bytes)
        self.ended = threading.Event()

    def look(self):
        for level, root in self.roots.items():
            for marker in root.glob(f"{JOB}/[0-9]*/[0-9]*/complete.json"):
                version = (int(marker.parent.parent.name), int(marker.parent.name))
                if version in self.complete[level]:
                    continue
                try:
                    size = sum(part.stat().st_size for part in marker.parent.glob("rank-*") if part.suffix != ".tmp")
                    self.complete[level][version] = (marker.stat().st_ctime, size)
                except FileNotFoundError:
                    continue  # it was retired while we looked

    def run(self):
        while not self.ended.wait(0.05):
            self.look()

    def stop(self):
        self.ended.set()
        self.join()
        self.look()


# ---- a reader that knows nothing of ckptd ----


def read_safetensors(path):
    """A safetensors file: the length of a header in JSON, the header, the bytes of all tensors.
    Gives name: (dtype, shape, bytes)."""
    raw = pathlib.Path(path).read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    tensors = {}
    for name, entry in json.loads(raw[8:start]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            tensors[name] = entry["dtype"], entry["shape"], raw[start + begin : start + end]
    return tensors


# ---- the three acts ----


def plan_kills(rng, steps, kills):
    """(step, victim, seconds after that step's loss appeared), in order; one victim is the daemon. Every second one dies
    within milliseconds of the save, for on a fast disk that is how long a checkpoint is on its way; the others whenever."""
    victims = ["trainer"] * kills
    victims.insert(rng.randrange(1, kills + 1), "daemon")
    share = (steps - 8) // len(victims)
    return [
        (6 + share * index + rng.randrange(share - 2), victim, rng.uniform(0, 0.2 if index % 2 else 0.006))
        for index, victim in enumerate(victims)
    ]


def run_reference(args, directory, environment, options):
    began = time.monotonic()
    trainer = Trainer(directory / "reference", [*options, "--no-checkpoint"], environment)
    try:
        trainer.finish(args.steps)
    finally:
        trainer.kill()
    print(f"reference   {args.steps} steps without a checkpoint, {time.monotonic() - began:.0f} s", flush=True)


def run_and_kill(args, directory, environment, options, plan):
    """Trains to the end through all kills; of each kill of the trainer (time, last step, step resumed from)."""
    out, killed = directory / "run", []
    trainer = Trainer(out, options, environment)
    try:
        for step, victim, delay in plan:
            trainer.wait_for(step)
            time.sleep(delay)
            if victim == "daemon":
                pids = daemons(directory)
                if not pids:
                    raise Failure("no daemon of this run is there to be killed")
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                print(f"killed      the daemon after step {trainer.last_step()}; training goes on", flush=True)
                continue
            trainer.kill()
            at = time.time()
            reached, starts = trainer.last_step(), len(resumes(out))
            trainer = Trainer(out, options, environment)
            while len(resumes(out)) == starts:
                trainer.wait_for(-1)  # it lives
                time.sleep(0.005)
            resumed = resumes(out)[-1]["resumed"]
            if resumed is None:
                raise Failure(f"killed after step {reached}, the trainer found no checkpoint")
            killed.append((at, reached, resumed))
            print(f"killed      the trainer after step {reached}; it resumed from step {resumed}", flush=True)
        trainer.finish(args.steps)
        return killed
    finally:
        trainer.kill()


def resumes(out):
    return [entry for entry in read_lines(out / "times.jsonl") if "resumed" in entry]


def compare(directory):
    """The reference and the run, bit for bit. The digests of the final state."""
    finals = [json.loads((directory / run / "final.json").read_text()) for run in ("reference", "run")]
    losses = [read_lines(directory / run / "losses.jsonl") for run in ("reference", "run")]
    different = [name for name in finals[0] if finals[0][name] != finals[1].get(name)]
    different += [name for name in finals[1] if name not in finals[0]]
    different += [f"loss of step {a['step']}: {a['loss']!r}, {b['loss']!r}" for a, b in zip(*losses) if a != b]
    if len(losses[0]) != len(losses[1]):
        different.append(f"{len(losses[0])} and {len(losses[1])} losses")
    if different:
        raise Failure("the run differs from the reference in:\n" + "".join(f"    {name}\n" for name in different))
    print(f"compared    {len(finals[0])} tensors and states, {len(losses[0])} losses: equal bit for bit")
    return finals[1]


def read_back(path, digests):
    """Opens the last checkpoint without ckptd, and finds the final state in it."""
    tensors = read_safetensors(path)
    stored = {hashlib.sha256(data).hexdigest() for _, _, data in tensors.values()}
    wanted = {name: digest for name, digest in digests.items() if name.startswith(("model.", "average.", "optimizer."))}
    missing = [name for name, digest in wanted.items() if digest not in stored]
    if missing:
        raise Failure(f"{path} lacks " + ", ".join(missing))
    print(f"\n{path.relative_to(path.parents[4])}, read as plain safetensors:")
    print(f"  {len(tensors)} tensors, among them all {len(wanted)} of the final model, average and optimizer; the largest:")
    for name, (dtype, shape, _) in sorted(tensors.items(), key=lambda item: -len(item[1][2]))[:3]:
        print(f"  {name}  {dtype} {shape}")


# ---- the table ----


def median(values):
    return percentile(values, 50)


def percentile(values, percent):
    ordered = sorted(values)
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)] if ordered else float("nan")


def in_flight(watcher, killed):
    """How many kills hit a checkpoint that was not durable yet: it became so afterwards, or was lost."""
    hit = 0
    for at, reached, resumed in killed:
        versions = [version for version in watcher.complete["LOCAL"] if version[1] == resumed]
        hit += reached > resumed or (bool(versions) and watcher.complete["LOCAL"][max(versions)][0] > at)
    return hit


def report(directory, watcher, killed):
    entries = read_lines(directory / "run" / "times.jsonl")
    starts = [entry for entry in entries if "resumed" in entry]
    steps = [entry for entry in entries if "step" in entry]
    reference = [entry["step_ms"] for entry in read_lines(directory / "reference" / "times.jsonl") if "step" in entry]
    step_ms = median(entry["step_ms"] for entry in steps)
    lost = [max(reached - resumed, 0) for _, reached, resumed in killed]
    results = collections.Counter(entry["saved"] for entry in steps)

    saved_at, generation = {}, None
    for entry in entries:
        if "resumed" in entry:
            generation = entry["generation"]
        elif entry["saved"] == "saved":
            saved_at[generation, entry["step"]] = entry["at"]

    rows = [
        ("steps", f"{len(reference)}, and {sum(lost)} done again after kills"),
        ("checkpoints", f"{results['saved']} taken, {results['skipped']} skipped, {results['failed']} failed (no daemon)"),
        ("step, median", f"{step_ms:.1f} ms; without checkpoints {median(reference):.1f} ms"),
    ]
    for label, key in (("in save", "save_ms"), ("in the fence", "fence_ms")):
        values = [entry[key] for entry in steps]
        middle, high = median(values), percentile(values, 99)
        rows.append(
            (f"blocked {label}", f"{middle:.2f} ms median ({middle / step_ms:.1%} of a step), {high:.2f} ms p99 ({high / step_ms:.1%})")
        )
    for level, complete in watcher.complete.items():
        delays = [(at - saved_at[version]) * 1e3 for version, (at, _) in complete.items() if version in saved_at]
        written = sum(size for _, size in complete.values())
        rows.append(
            (f"durable {level}", f"{len(complete)} versions, {written / 1e6:.0f} MB; {median(delays):.0f} ms after save (median)")
        )
    rows += [
        ("steps lost", f"{', '.join(map(str, lost))} per kill of the trainer; none by the kill of the daemon"),
        ("in flight", f"in {in_flight(watcher, killed)} of {len(killed)} kills of the trainer the last checkpoint was not durable yet"),
        ("resuming", f"{median(start['open_ms'] + start['restore_ms'] for start in starts[1:]):.0f} ms to open and restore (median)"),
        ("they lie in", f"{directory}/{{local,parallel}}/{JOB}"),
    ]
    print()
    for name, value in rows:
        print(f"  {name:22} {value}")


# ---- from beginning to end ----


def environment_for(args, directory):
    """What the trainer, the daemon and ckptctl are told; nothing of the user's own set-up leaks in."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("CKPT", "SLURM_", "PMIX_", "XDG_", "RANK", "WORLD_SIZE", "MASTER_"))
    }
    build = pathlib.Path(args.build).resolve()
    return environment | {
        "PYTHONPATH": str(HERE.parents[1] / "client" / "python"),
        "CKPT_LIBRARY": str(build / "client" / "libckpt.so.0"),
        "CKPTD_PROGRAM": str(build / "daemon" / "ckptd"),
        "CKPTD_CONFIG": str(directory / "ckptd.conf"),
        "XDG_RUNTIME_DIR": str(directory / "runtime"),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def demonstrate(args, directory):
    environment = environment_for(args, directory)
    roots = {"LOCAL": directory / "local", "GLOBAL": directory / "parallel"}
    for path in [directory / "runtime", *roots.values()]:
        path.mkdir(mode=0o700)
    (directory / "ckptd.conf").write_text(CONFIGURATION.format(directory=directory))
    options = ["--job", JOB, "--steps", str(args.steps)]
    plan = plan_kills(random.Random(args.seed), args.steps, args.kills)
    print(f"seed        {args.seed}: --seed {args.seed} kills at the same steps again")

    run_reference(args, directory, environment, options)
    watcher = Watcher(roots)
    watcher.start()
    try:
        killed = run_and_kill(args, directory, environment, options, plan)
        drained = time.monotonic() + 30
        while not list(roots["GLOBAL"].glob(f"{JOB}/*/{args.steps - 1}/complete.json")):
            if time.monotonic() > drained:
                raise Failure("the last checkpoint did not become GLOBAL within 30 s of the end of training")
            time.sleep(0.05)
    finally:
        watcher.stop()
    digests = compare(directory)
    report(directory, watcher, killed)
    read_back(next(roots["GLOBAL"].glob(f"{JOB}/*/{args.steps - 1}/rank-00000.safetensors")), digests)

    print(f"\n$ ckptctl ls {JOB}", flush=True)
    subprocess.run([pathlib.Path(args.build) / "tools" / "ckptctl", "ls", JOB], env=environment, check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", default=HERE.parents[1] / "build", help="build directory of ckptd")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--kills", type=int, default=4, help="of the trainer; the daemon is killed once")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--keep", action="store_true", help="leave the run directory, to look at it")
    args = parser.parse_args()
    if args.seed is None:
        args.seed = secrets.randbelow(1_000_000)
    if args.kills < 1 or args.steps < 8 + 5 * (args.kills + 1):
        parser.error("at least one kill, and at least five steps for each")

    if importlib.util.find_spec("torch") is None:
        print("this python has no torch: apt-get install python3-torch")
        return 77
    service = pathlib.Path("/run/ckptd", getpass.getuser(), "sock")
    if service.exists():
        print(f"a ckptd of this machine serves you at {service}; we would kill it, so run this as another user")
        return 77
    directory = pathlib.Path(tempfile.mkdtemp(prefix="ckptd-demo.", dir="/var/tmp"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    failed, began = True, time.monotonic()
    try:
        demonstrate(args, directory)
        failed = False
    except (Failure, subprocess.CalledProcessError) as error:
        print(f"\nFAILED      {error}", flush=True)
    finally:
        if not stop_daemons(directory):
            print("FAILED      the daemon did not stop when asked to", flush=True)
            failed = True
        if failed and (directory / "ckptd.log").exists():
            print("the daemon's log ends with:\n" + "\n".join((directory / "ckptd.log").read_text().splitlines()[-30:]))
        if not args.keep:
            shutil.rmtree(directory)
    print(f"\n{'kept ' + str(directory) if args.keep else 'nothing is left behind'}; {time.monotonic() - began:.0f} s in all")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
