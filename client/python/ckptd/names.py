# SPDX-License-Identifier: Apache-2.0
"""Names of tensors: ``<object>/<key>/<key>...``, readable and free of collisions.

A path is a sequence of keys: the object's name, then one key per container. Each key becomes one
segment, segments are joined by ``/``:

=====================  =======================================================================
key                    segment
=====================  =======================================================================
``str``                itself, with ``%``, ``/``, control characters and lone surrogates
                       escaped (``%25``, ``%2F``, ``%0A``, ``%uD800``)
the empty ``str``      ``%_``
list or tuple index    the decimal number (a container is a list or a dict, never both)
``int`` in a dict      ``%i`` and the decimal number (of 64 bits; larger: the next line)
any other dict key     ``%j`` and its typed JSON (see `ckptd.typed`), escaped like a ``str``
reserved words         ``%`` and a lower-case word (`reserved`): no user's key looks like that
=====================  =======================================================================

A state_dict's key is one key, so its dots stay: ``model/layer1.0.weight``. ``{"a": {"b": t}}`` is
``a/b``, ``{"a.b": t}`` is ``a.b`` and ``{"a/b": t}`` is ``a%2Fb``.
"""
from __future__ import annotations

import re
from functools import lru_cache

_UNSAFE = re.compile("[%/\x00-\x1f\x7f\ud800-\udfff]")


def _escape_character(match: "re.Match[str]") -> str:
    code = ord(match.group())
    return "%%%02X" % code if code < 0x80 else "%%u%04X" % code


@lru_cache(maxsize=65536)
def escape(key: str) -> str:
    """The segment of a ``str`` key."""
    return _UNSAFE.sub(_escape_character, key) if key else "%_"


class Reserved(str):
    """A segment that `segment` leaves alone; made by `reserved`."""

    __slots__ = ()


def reserved(word: str) -> Reserved:
    """A segment that no user's key can have: ``%`` and `word`, which must be lower-case letters and digits
    not starting with ``i``, ``j`` or ``u``."""
    return Reserved("%" + word)


def segment(key: object) -> str:
    """The segment of one dict key (see the module's table)."""
    if type(key) is str:
        return escape(key)
    if type(key) is int and -(1 << 63) <= key < 1 << 64:
        return "%%i%d" % key
    if isinstance(key, Reserved):
        return str(key)
    from . import typed

    return "%j" + escape(typed.dumps(key))


def join(prefix: str, key: object) -> str:
    """`prefix` (already a name) extended by one dict key."""
    return prefix + "/" + segment(key)


def index(prefix: str, position: int) -> str:
    """`prefix` (already a name) extended by a position in a list or tuple."""
    return "%s/%d" % (prefix, position)


def split(name: str) -> "list[str]":
    """The segments of a name, still escaped."""
    return name.split("/")


_ESCAPED = re.compile("%u([0-9A-F]{4})|%([0-9A-F]{2})")


def unescape(text: str) -> str:
    """The ``str`` key of a segment that `escape` made."""
    if text == "%_":
        return ""
    return _ESCAPED.sub(lambda match: chr(int(match.group(1) or match.group(2), 16)), text)
