#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A training loop whose model lives on a GPU, with a checkpoint after every step. Kill it and run it again.

    gpu.py [JOB] [STEPS]

Nothing differs from a loop on the host: tensors are found on the device, copied out of it by the daemon, behind the
work that is queued on torch's current stream, and restored to where they are.
"""
import sys

import torch
from torch import nn

import ckptd


def main():
    if not torch.cuda.is_available():
        sys.exit("gpu.py: this PyTorch sees no CUDA device; examples/train/train.py does the same on the host")
    job = sys.argv[1] if len(sys.argv) > 1 else "gpu-torch"
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with ckptd.Checkpointer(job, model=model, optimizer=optimizer) as ckpt:
        resumed = ckpt.restore()  # step of the newest complete version, or None
        print("resumed from step %s" % resumed if resumed is not None else "a fresh start", flush=True)
        loss = None
        for step in range(0 if resumed is None else resumed + 1, steps):
            batch = torch.randn(512, 64, device="cuda")
            optimizer.zero_grad()
            loss = (model(batch) - batch.flip(1)).square().mean()
            loss.backward()
            optimizer.step()  # fences by itself: the last save's bytes are out of the device
            ckpt.save(step)  # returns at once; only the daemon waits for the device
        usage = ckpt.device_usage()
        print("the daemon takes %.0f MiB of device memory for its context" % (usage.context_bytes / 2**20))
        ckpt.wait("local")
    print("done, loss %s" % ("-" if loss is None else "%.4f" % loss.item()))


main()
