# SPDX-License-Identifier: Apache-2.0
"""Everything that is neither a module nor an optimizer: containers, arrays, values, and objects with state_dict.

Arrays may change at any time, so they are copied inside save, unless the object was given as `ckptd.fenced`.
"""
from __future__ import annotations

import sys
import types
import weakref
from typing import Any, Optional

from . import arrays, names, tree, typed
from .arrays import Leaf
from .plan import Plan


class PlainSource:
    """A container, an array, or an immutable value (which lives in ``Checkpointer.values``)."""

    kind = "plain"

    def __init__(self, name: str, value: Any, fenced: bool, allow_pickle: bool, values: "dict[str, Any]"):
        self.name = name
        self.value = value
        self.allow_pickle = allow_pickle
        self._fenced = fenced
        self._prefix = names.escape(name)
        self._cache = tree.LeafCache()
        self._watch: "Optional[tree.Watch]" = None
        self._text = ""
        self._values = values
        self._in_values = not tree.is_mutable(value) and arrays.describe(value, self._prefix) is None
        if self._in_values:
            values[name] = value

    def scan(self) -> "tuple[list[Leaf], str]":
        if self._in_values:
            self.value = self._values[self.name]
        if self._watch is not None and self._watch.unchanged(self.value) and self._cache.reuse():
            return self._cache.current, self._text
        before = self._cache.current
        gatherer = tree.Gatherer({leaf.name: leaf for leaf in before})
        encoded = typed.encode(self.value, self._prefix, gatherer, self.allow_pickle)
        leaves = gatherer.leaves
        if len(leaves) != len(before) or not (tree.same_objects(leaves, before) and self._cache.reuse()):
            fresh = tree.Gatherer()
            for leaf in leaves:
                fresh(leaf.value, leaf.name)
            for leaf in fresh.leaves:
                leaf.fenced = self._fenced
            self._cache.replace(fresh.leaves)
        self._text = '{"kind":"plain","v":%s}' % typed.to_text(encoded)
        self._watch = tree.Watch(self.value, self._cache.current)
        return self._cache.current, self._text

    def plan(self, plan: Plan, state: Any) -> None:
        live = {leaf.name: leaf for leaf in self._cache.current}
        if plan.wants_object(self._prefix):
            if state is None:
                plan.missing.append(self._prefix)
                return
            stored = typed.decode(state["v"], self._prefix, plan.tree_leaf(live), plan.allow_pickle)
            plan.then(lambda: self._put(stored))
            return
        for name, leaf in live.items():
            if plan.wants(name):
                plan.read(leaf)

    def _put(self, stored: Any) -> None:
        self.value = tree.merge(self.value, stored)
        if self._in_values:
            self._values[self.name] = self.value


_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, weakref.ref)


def _is_code(value: Any) -> bool:
    return isinstance(value, _CODE)


def _code_name(value: Any) -> str:
    return "%s.%s" % (getattr(value, "__module__", ""), getattr(value, "__qualname__", type(value).__qualname__))


def is_shared(value: Any) -> bool:
    """Learning-rate schedulers and gradient scalers are the same on all ranks; other objects with state_dict (data
    loaders, samplers) are each rank's own."""
    return any(kind.__name__ in ("LRScheduler", "_LRScheduler", "ReduceLROnPlateau", "GradScaler") for kind in type(value).__mro__)


class StatefulSource:
    """An object with state_dict and load_state_dict. Its arrays are taken from a new state_dict at every save.

    Functions, methods and classes in it (some schedulers keep theirs there) are not data: their names are stored,
    and on restore the object keeps its own.
    """

    kind = "stateful"

    def __init__(self, name: str, value: Any, allow_pickle: bool):
        self.name = name
        self.value = value
        self.allow_pickle = allow_pickle
        self._prefix = names.escape(name)
        self._stages = tree.Stages()
        self._leaves: "list[Leaf]" = []

    def scan(self) -> "tuple[list[Leaf], str]":
        gatherer = tree.Gatherer()

        def leaf(value: Any, name: str) -> Any:
            if _is_code(value):
                return {"$": "code", "v": _code_name(value)}
            return gatherer(value, name)

        encoded = typed.encode(self.value.state_dict(), self._prefix, leaf, self.allow_pickle)
        leaves = [self._stages.put(leaf) for leaf in gatherer.leaves]
        if [leaf.identity() for leaf in leaves] != [leaf.identity() for leaf in self._leaves]:
            self._leaves = leaves
        return self._leaves, '{"kind":"stateful","v":%s}' % typed.to_text(encoded)

    def plan(self, plan: Plan, state: Any) -> None:
        if not plan.wants_object(self._prefix):
            return
        if state is None:
            plan.missing.append(self._prefix)
            return
        here: "Optional[dict[str, Any]]" = None
        tensor = plan.tree_leaf({})

        def leaf(data: dict, name: str) -> Any:
            nonlocal here
            if data.get("$") != "code":
                return tensor(data, name)
            if here is None:
                here = _code_in(self.value.state_dict(), self._prefix, self.allow_pickle)
            if name not in here:
                plan.missing.append("%s (the function %s, which the object here does not have)" % (name, data["v"]))
                return None
            if _code_name(here[name]) != data["v"]:
                plan.mismatched.append("%s: stored with %s, here %s" % (name, data["v"], _code_name(here[name])))
            return here[name]

        stored = typed.decode(state["v"], self._prefix, leaf, plan.allow_pickle)
        plan.then(lambda: self.value.load_state_dict(stored))


def _code_in(state: Any, prefix: str, allow_pickle: bool) -> "dict[str, Any]":
    found: "dict[str, Any]" = {}

    def leaf(value: Any, name: str) -> Any:
        if _is_code(value):
            found[name] = value
            return None
        return None if arrays.describe(value, name) is not None else typed.NOT_A_LEAF

    typed.encode(state, prefix, leaf, allow_pickle)
    return found


def is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def is_module(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def is_optimizer(value: Any) -> bool:
    return isinstance(getattr(value, "param_groups", None), list) and hasattr(value, "state") and callable(
        getattr(value, "step", None)
    )
