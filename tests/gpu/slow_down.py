#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a training step loses while the daemon copies out of the device: a loop of matrix products with and without a
save in every iteration, in turns; then torch tensors saved and restored, bit for bit.

    slow_down.py MIB    of tensors to save (CKPT_SOCKET: the daemon's)
"""
import statistics
import sys
import time

import torch

import ckptd

ROUNDS, PRODUCTS = 7, 40


def loop(ckpt, weights, product, step):
    """Seconds of one iteration: products, then (with a checkpointer) the fence, a change, and a save."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(PRODUCTS):
        torch.mm(product, product)
    if ckpt is not None:
        ckpt.fence()
    weights.add_(1)
    if ckpt is not None:
        ckpt.save(step)
    for _ in range(PRODUCTS):
        torch.mm(product, product)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def main():
    size = int(sys.argv[1]) << 20
    weights = torch.zeros(size // 4, device="cuda")
    product = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    with ckptd.Checkpointer("slow-down", weights=ckptd.fenced(weights)) as ckpt:
        step, with_saves, without = 0, [], []
        for _ in range(ROUNDS + 2):
            without.append(loop(None, weights, product, 0))
            with_saves.append(loop(ckpt, weights, product, step))
            ckpt.fence()
            step += 1
        base, saved = statistics.median(without[2:]), statistics.median(with_saves[2:])
        print("iteration: %.1f ms without, %.1f ms with a save of %d MiB: slow-down %.1f %%"
              % (base * 1e3, saved * 1e3, size >> 20, 100 * (saved / base - 1)))
        print("who copies: %s" % (ckpt.info.push_reason if ckpt.info.push else "the daemon"))
        ckpt.fence()
        expected = weights.clone()
        assert ckpt.save(step), "the last save failed"
        assert ckpt.wait("local")
        weights.zero_()
        assert ckpt.restore() == step
        assert torch.equal(weights, expected), "restored bytes differ"
        torch.cuda.empty_cache()
    print("torch tensors restored bit for bit")


main()
