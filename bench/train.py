# SPDX-License-Identifier: Apache-2.0
"""training with a checkpoint after every step

The example's model, somewhat larger, on one thread, with: ckptd to LOCAL; torch.save and fsync in the loop; a copy in
the loop and a thread that saves and syncs it. Compared are step times with those of no checkpoints at all, and
"blocked": the time per step in `save` and in the fence, and "durable": from the beginning of `save` until the
checkpoint is synced (of ckptd as its trace has it), in units of a step without.
"""

import copy
import importlib.util
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from harness import Failure, Unavailable

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = ["--layers=6", "--width=256"]
WARM_STEPS = 4
KINDS = {"ckptd": "ckptd", "torch": "torch.save", "thread": "copy and thread"}


class InTheLoop:
    """torch.save, durable before training goes on."""

    info = None

    def __init__(self, objects, directory):
        self.objects, self.path = objects, directory / "state.pt"
        self.durable = []  # seconds that each save took until it was synced

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.path.with_name("durable.json").write_text(json.dumps(self.durable))

    def restore(self):
        return None

    def fence(self):
        pass

    def write(self, state, began):
        import torch

        fresh = self.path.with_suffix(".new")
        with open(fresh, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(self.path)
        self.durable.append(time.monotonic() - began)

    def save(self, step, to):
        self.write({name: value.state_dict() for name, value in self.objects.items()}, time.monotonic())


class InAThread(InTheLoop):
    """A copy, which a thread saves during the next step."""

    thread = None

    def __exit__(self, *_):
        if self.thread:
            self.thread.join()
        super().__exit__()

    def save(self, step, to):
        began = time.monotonic()
        if self.thread:
            self.thread.join()
        state = copy.deepcopy({name: value.state_dict() for name, value in self.objects.items()})
        self.thread = threading.Thread(target=self.write, args=(state, began))
        self.thread.start()


def train(kind, directory, arguments):
    """In a process of its own: the example with another checkpointer."""
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples/train/train.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    classes = {"torch": InTheLoop, "thread": InAThread}
    if kind in classes:
        example.checkpointer = lambda args, **objects: classes[kind](objects, pathlib.Path(directory))
    sys.argv = ["train.py", "--quiet", *MODEL, *arguments, *(["--no-checkpoint"] if kind == "none" else [])]
    example.main()


def traced(bench, daemon, job):
    """Seconds from the acceptance of each save to its completion in the tier, as the daemon remembers them."""
    command = [bench.build / "tools/ckptctl", "trace", job, "--socket", daemon.socket]
    events = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["traceEvents"]
    begins, ends = (
        {event["args"]["step"]: event["ts"] for event in events if event.get("cat") == kind}
        for kind in ("capture", "complete")
    )
    return [(ends[step] - begins[step]) / 1e6 for step in sorted(ends) if step in begins]


def measure(bench, daemon, kind, number, steps):
    """Seconds: of a step, of what blocks it, and until it is durable."""
    memory = pathlib.Path("/dev/shm")
    out = pathlib.Path(tempfile.mkdtemp(prefix="ckptd-bench.", dir=memory if memory.is_dir() else bench.scratch))
    files = pathlib.Path(tempfile.mkdtemp(dir=daemon.directory))
    environment = {
        **os.environ,
        "CKPT_SOCKET": str(daemon.socket),
        "CKPT_LIBRARY": str(bench.build / "client/libckpt.so"),
        "PYTHONPATH": str(ROOT / "client/python"),
    }
    options = [f"--steps={steps + WARM_STEPS}", f"--out={out}", f"--job=train-{number}", "--every=1000000"]
    try:
        ran = subprocess.run(
            [sys.executable, __file__, kind, files, *options], env=environment, capture_output=True, text=True
        )
        if ran.returncode:
            reason = (ran.stderr.strip().splitlines() or ["no reason"])[-1]
            raise (Unavailable if "No module named" in reason else Failure)(reason)
        entries = [json.loads(line) for line in (out / "times.jsonl").read_text().splitlines()]
        durable = []
        if kind == "ckptd":
            durable = traced(bench, daemon, f"train-{number}")
        elif kind != "none":
            durable = json.loads((files / "durable.json").read_text())
    finally:
        shutil.rmtree(out)
        shutil.rmtree(files)
    entries = [entry for entry in entries if entry.get("step", 0) >= WARM_STEPS]
    skipped = sum(entry["saved"] not in (None, "saved") for entry in entries)
    if skipped:
        bench.book.note(f"{kind}: {skipped} of {len(entries)} saves were skipped")
    step = statistics.median(entry["step_ms"] for entry in entries) / 1e3
    blocked = statistics.mean(entry["save_ms"] + entry["fence_ms"] for entry in entries) / 1e3
    return step, blocked, statistics.median(durable[WARM_STEPS:]) if durable[WARM_STEPS:] else None


def run(bench):
    steps, rounds = (6, 2) if bench.quick else (12, 3)
    pairs, blocked, durable = ({kind: [] for kind in KINDS} for _ in range(3))
    with bench.daemon("train", "1G", tier_options="keep = 1\ntrash_grace_s = 0") as daemon:
        for number in range(rounds):
            plain, _, _ = measure(bench, daemon, "none", number, steps)
            for kind in KINDS:
                step, block, until = measure(bench, daemon, kind, number, steps)
                pairs[kind].append((step, plain))
                blocked[kind].append((block, plain))
                if until is not None:
                    durable[kind].append((until, plain))
    for kind, name in KINDS.items():
        bench.book.time(f"step with {name}", pairs[kind], "none")
    for kind, name in KINDS.items():
        bench.book.time(f"blocked by {name}", blocked[kind], "a step")
    for kind, name in KINDS.items():
        if durable[kind]:
            bench.book.time(f"durable by {name}", durable[kind], "a step")


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], sys.argv[3:])
