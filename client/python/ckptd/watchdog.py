# SPDX-License-Identifier: Apache-2.0
"""Telling the user, without drowning the log: failures at the first and each doubling, and when nothing became
durable for too long."""
from __future__ import annotations

import logging
import time
from typing import Any, Callable, Optional

from .errors import NothingDurable

log = logging.getLogger("ckptd")


class Doubling:
    """Counts one kind of failure and logs the first, second, fourth, ... in a row."""

    def __init__(self, what: str):
        self.what = what
        self.count = 0

    def failed(self, reason: str) -> None:
        self.count += 1
        if self.count & (self.count - 1) == 0:
            log.warning("%s: %s (%d in a row)", self.what, reason, self.count)

    def succeeded(self) -> None:
        if self.count:
            log.info("%s: works again after %d", self.what, self.count)
        self.count = 0


class DurabilityWatch:
    """Warns (or raises) when no version became durable for `limit` seconds. Asked at every save, it looks at most
    every `interval` seconds."""

    interval = 5.0

    def __init__(self, limit: float, action: str, clock: "Callable[[], float]" = time.monotonic):
        if action not in ("warn", "raise"):
            raise ValueError('on_unsaved is "warn" or "raise", not %r' % (action,))
        self.limit = limit
        self.action = action
        self._clock = clock
        self._since = clock()
        self._looked = self._since
        self._doubling = Doubling("nothing became durable")

    def check(self, age: "Callable[[], Optional[float]]") -> None:
        """`age` answers with the seconds since the newest durable version, or None if there is none or no answer."""
        now = self._clock()
        if self.limit <= 0 or now - self._looked < min(self.interval, self.limit):
            return
        self._looked = now
        seconds: Any = age()
        quiet = now - self._since
        if seconds is not None:
            quiet = min(quiet, seconds)
        if quiet <= self.limit:
            self._doubling.succeeded()
            return
        sentence = (
            "no checkpoint became durable for %.0f s (max_unsaved is %.0f s); look at ckptctl status and the daemon's log"
            % (quiet, self.limit)
        )
        if self.action == "raise":
            raise NothingDurable(sentence)
        self._doubling.failed(sentence)
