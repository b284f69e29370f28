# SPDX-License-Identifier: Apache-2.0
"""Makes the package importable from the source tree, and says what is installed."""
import importlib.util
import os
import pathlib
import random
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "client" / "python"))

HAVE_TORCH = importlib.util.find_spec("torch") is not None
HAVE_NUMPY = importlib.util.find_spec("numpy") is not None

needs_torch = unittest.skipUnless(HAVE_TORCH, "torch is not installed")
needs_numpy = unittest.skipUnless(HAVE_NUMPY, "numpy is not installed")


def seeded(name):
    """A generator whose seed is printed, or comes from CKPTD_TEST_SEED."""
    seed = int(os.environ.get("CKPTD_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
    print("%s: CKPTD_TEST_SEED=%d" % (name, seed), file=sys.stderr)
    return random.Random(seed)
