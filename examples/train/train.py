#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small language model, with a checkpoint after every step.

A character-level GPT learns Python from the sources of the standard library, which every machine
has. It is small, but it has all that makes a training run hard to resume exactly: dropout, Adam's
moments, a learning rate schedule, accumulated gradients, an averaged copy of the weights, and an
order of the data that comes from a random generator. Resumed from a checkpoint it goes on bit for
bit as if nothing had happened, which demo.py proves.

What ckptd needs of a training loop stands between the two lines of dashes in train().

Into --out it writes
  losses.jsonl  {"step", "loss"}: one line per step, synced before the step's checkpoint is taken;
                a resumed run drops the lines from its resume step on
  times.jsonl   {"step", "at", "step_ms", "save_ms", "fence_ms", "saved"}, and {"resumed", "generation",
                "open_ms", "restore_ms"} once per start: appended, never dropped
  final.json    SHA-256 of every tensor of the final state
"""

import argparse
import copy
import hashlib
import json
import math
import os
import pathlib
import random
import sysconfig
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 128  # ASCII; anything else reads as "?"


def read_text(file):
    """The bytes to learn from, as a tensor: a file of one's own, or the standard library."""
    if file:
        text = pathlib.Path(file).read_bytes()
    else:
        sources = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"\n".join(source.read_bytes() for source in sources)
    codes = np.frombuffer(text, dtype=np.uint8)
    return torch.from_numpy(np.where(codes < VOCABULARY, codes, ord("?")).astype(np.int64))


class Batches:
    """Endless random windows of the text. The generator's state says which ones come next."""

    def __init__(self, text, batch, context, seed):
        self.text, self.batch, self.context = text, batch, context
        self.generator = torch.Generator().manual_seed(seed)
        self.taken = 0

    def next(self):
        starts = torch.randint(len(self.text) - self.context, (self.batch,), generator=self.generator)
        windows = torch.stack([self.text[start : start + self.context + 1] for start in starts.tolist()])
        self.taken += 1
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self):
        return {"generator": self.generator.get_state(), "taken": self.taken}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])
        self.taken = state["taken"]


class Block(nn.Module):
    def __init__(self, width, heads, context, dropout):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("future", torch.ones(context, context, dtype=torch.bool).triu(1), persistent=False)

    def attend(self, x):
        batch, length, width = x.shape
        queries, keys, values = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.attention_in(x).chunk(3, dim=-1)
        )
        scores = queries @ keys.transpose(-2, -1) / math.sqrt(width // self.heads)
        weights = scores.masked_fill(self.future[:length, :length], -math.inf).softmax(dim=-1)
        mixed = self.dropout(weights) @ values
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x):
        x = x + self.dropout(self.attend(self.attention_norm(x)))
        return x + self.dropout(self.feed(self.feed_norm(x)))


class GPT(nn.Module):
    def __init__(self, layers, width, heads, context, dropout):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, context, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.token.weight  # tied: one tensor with two names

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1])
        x = self.dropout(self.token(tokens) + self.position(positions))
        return self.head(self.norm(self.blocks(x)))


class Average:
    """An exponential moving average of the weights, the copy that one would evaluate."""

    def __init__(self, model, decay):
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for mine, new in zip(self.model.parameters(), model.parameters()):
            mine.lerp_(new, 1 - self.decay)


class Journal:
    """Lines of JSON in a file; what was written before a kill stays."""

    def __init__(self, path, synced):
        self.file = open(path, "a", encoding="ascii")
        self.synced = synced

    def write(self, **entry):
        self.file.write(json.dumps(entry) + "\n")
        self.file.flush()
        if self.synced:
            os.fsync(self.file.fileno())


def drop_lines_from(path, step):
    """Forgets the steps that a resumed run is about to do again."""
    if not path.exists():
        return
    kept = [line for line in path.read_text().splitlines() if json.loads(line)["step"] < step]
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(line + "\n" for line in kept))
    fresh.rename(path)


def digests(model, average, optimizer, schedule, batches):
    """SHA-256 of everything that the future of the run depends on, by name."""
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    state |= {f"average.{name}": value for name, value in average.model.state_dict().items()}
    for index, moments in optimizer.state_dict()["state"].items():
        state |= {f"optimizer.{index}.{name}": torch.as_tensor(value) for name, value in moments.items()}
    state["batches.generator"] = batches.generator.get_state()
    state["torch.random"] = torch.get_rng_state()
    found = {name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in state.items()}
    scalars = {"batches.taken": batches.taken, "schedule.rate": schedule.get_last_lr(), "python.random": random.random()}
    return found | {name: repr(value) for name, value in scalars.items()}


class NoCheckpointer:
    """The unbroken run that the others are compared with."""

    info = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def restore(self):
        return None

    def fence(self):
        pass

    def save(self, step, to):
        return None


def checkpointer(args, **objects):
    if args.no_checkpoint:
        return NoCheckpointer()
    import ckptd

    return ckptd.Checkpointer(args.job, **objects)


def milliseconds_since(start):
    return round((time.perf_counter() - start) * 1e3, 4)


def train(args):
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)

    model = GPT(args.layers, args.width, args.heads, args.context, args.dropout)
    average = Average(model, args.average)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = max(args.steps // 10, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * min(step / args.steps, 1)))),
    )
    batches = Batches(read_text(args.text), args.batch, args.context, args.seed)

    opening = time.perf_counter()
    # ----------------------------------------------------------------------------------------------
    with checkpointer(
        args, model=model, average=average.model, optimizer=optimizer, schedule=schedule, batches=batches
    ) as ckpt:
        open_ms, restoring = milliseconds_since(opening), time.perf_counter()
        resumed = ckpt.restore()
        first = 0 if resumed is None else resumed + 1
        restore_ms = milliseconds_since(restoring)

        drop_lines_from(args.out / "losses.jsonl", first)
        losses = Journal(args.out / "losses.jsonl", synced=True)
        times = Journal(args.out / "times.jsonl", synced=False)
        generation = ckpt.info.generation if ckpt.info else None
        times.write(resumed=resumed, generation=generation, open_ms=open_ms, restore_ms=restore_ms)

        for step in range(first, args.steps):
            began = time.perf_counter()
            loss = 0.0
            for _ in range(args.accumulate):  # reads the weights, while the last checkpoint is captured
                inputs, targets = batches.next()
                scores = model(inputs)
                part = functional.cross_entropy(scores.flatten(0, 1), targets.flatten()) / args.accumulate
                part.backward()
                loss += part.item()

            fencing = time.perf_counter()
            ckpt.fence()  # optimizer.step() would do it, too; here it is timed
            fence_ms = milliseconds_since(fencing)

            optimizer.step()  # writes the weights
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            average.update(model)
            losses.write(step=step, loss=loss)

            at, saving = time.time(), time.perf_counter()
            deep = (step + 1) % args.every == 0 or step + 1 == args.steps
            saved = ckpt.save(step, to="GLOBAL" if deep else "LOCAL")  # returns at once
            save_ms = milliseconds_since(saving)
            # --------------------------------------------------------------------------------------
            times.write(
                step=step,
                at=at,
                step_ms=milliseconds_since(began),
                save_ms=save_ms,
                fence_ms=fence_ms,
                saved=saved and saved.value,
            )
            if not args.quiet:
                print(f"step {step:4}  loss {loss:.4f}", flush=True)

    final = digests(model, average, optimizer, schedule, batches)
    (args.out / "final.json").write_text(json.dumps(final, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory for losses, times and digests")
    parser.add_argument("--job", default="train", help="the name under which checkpoints are kept")
    parser.add_argument("--no-checkpoint", action="store_true", help="train without ckptd")
    parser.add_argument("--every", type=int, default=5, help="every so many steps, and at last, the checkpoint goes to GLOBAL")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--text", help="a file to learn from; default: Python's standard library")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2, help="batches per step")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--average", type=float, default=0.98, help="decay of the averaged weights")
    parser.add_argument("--quiet", action="store_true")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
