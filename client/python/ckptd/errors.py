# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, as exceptions. Every message is a sentence that says what to do."""
from __future__ import annotations


class LibraryMissing(ImportError):
    """libckpt.so.0 was not found or cannot be loaded."""


class CheckpointError(RuntimeError):
    """A negative result of libckpt. `code` is its number (``ckptd.binding.E_...``), `code_name` its name."""

    def __init__(self, message: str, code: int = 0, code_name: str = ""):
        super().__init__(message)
        self.code = code
        self.code_name = code_name


class DeadlinePassed(CheckpointError, TimeoutError):
    """A wait ended by its deadline."""


class RestoreMismatch(CheckpointError):
    """What is stored does not fit the live objects; nothing was changed. `problems` lists all of them."""

    def __init__(self, message: str, problems: "list[str]"):
        super().__init__(message)
        self.problems = problems


class NothingDurable(CheckpointError):
    """No version became durable for longer than `max_unsaved` (raised only with ``on_unsaved="raise"``)."""
