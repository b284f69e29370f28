# SPDX-License-Identifier: Apache-2.0
"""Optimizers: state by parameter name, hyperparameters as typed JSON.

A state tensor's name is ``<optimizer>/state/<module object>/<parameter>/<key>``; a parameter that belongs to no
module among the objects is ``<optimizer>/state/%group<g>/<position>/<key>``. The tensors only change in
``optimizer.step()``, so they are fence-protected. They come back with the dtype they were stored with, whatever
the parameter's is; state that does not exist yet is made.
"""
from __future__ import annotations

import json
from typing import Any, Callable, Optional

from . import arrays, names, tree, typed
from .arrays import Leaf
from .plan import Plan

#: Gives a parameter's (module object, state_dict key), or None.
Naming = Callable[[Any], "Optional[tuple[str, str]]"]

_REFUSED = {
    "ZeroRedundancyOptimizer": "its state differs from rank to rank and is not supported; use the plain optimizer "
    "or DTensor parameters",
}


class OptimizerSource:
    kind = "optimizer"

    def __init__(self, name: str, optimizer: Any, allow_pickle: bool):
        self.name = name
        self.value = optimizer
        self.allow_pickle = allow_pickle
        self.naming: Naming = lambda parameter: None
        self._prefix = names.escape(name)
        self._cache = tree.LeafCache()
        self._other = tree.LeafCache()
        self._leaves: "list[Leaf]" = []
        self._parameters: "list[Any]" = []
        self._groups: "list[int]" = []
        self._prefixes: "list[str]" = []
        self._keys: "list[str]" = []
        self._values: "list[Any]" = []
        self._counts: "list[int]" = []
        self._parameter_texts: "list[str]" = []
        reason = _REFUSED.get(type(optimizer).__name__)
        if reason:
            raise TypeError("%s: %s" % (self._prefix, reason))

    def renamed(self) -> None:
        """The parameters' names may have changed: they are looked up again at the next scan."""
        self._parameters = []

    # -- saving --

    def scan(self) -> "tuple[list[Leaf], str]":
        from .tensors import are_tensors

        self._scan_parameters()
        state = self.value.state
        keys: "list[str]" = []
        values: "list[Any]" = []
        odd: "list[int]" = []
        counts: "list[int]" = []
        found = 0
        for position, parameter in enumerate(self._parameters):
            entry = state.get(parameter)
            if entry is None:
                counts.append(0)
                continue
            found += 1
            if type(entry) is dict and are_tensors(entry.values()):
                keys += entry.keys()
                values += entry.values()
                counts.append(len(entry))
            else:
                odd.append(position)
                counts.append(0)
        if not (
            keys == self._keys and counts == self._counts and tree.same_objects(values, self._values)
            and self._cache.reuse()
        ):
            self._rebuild(keys, values, counts)
        return self._scan_rest(odd, len(state) - found)

    def _scan_parameters(self) -> None:
        groups = self.value.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        sizes = [len(group["params"]) for group in groups]
        if len(parameters) == len(self._parameters) and sizes == self._groups and tree.same_objects(
            parameters, self._parameters
        ):
            return
        self._parameters, self._groups = parameters, sizes
        self._prefixes, self._parameter_texts = [], []
        self._keys, self._values, self._counts = [], [], []
        for group_position, group in enumerate(groups):
            paths = []
            for position, parameter in enumerate(group["params"]):
                named = self.naming(parameter)
                path = (
                    "%s/%s" % (names.reserved("group%d" % group_position), position) if named is None
                    else "%s/%s" % (names.segment(named[0]), names.segment(named[1]))
                )
                paths.append(path)
                self._prefixes.append("%s/state/%s" % (self._prefix, path))
            self._parameter_texts.append(json.dumps(paths, separators=(",", ":")))
        self._cache = tree.LeafCache()

    def _rebuild(self, keys: "list[str]", values: "list[Any]", counts: "list[int]") -> None:
        leaves, position = [], 0
        for prefix, count in zip(self._prefixes, counts):
            for key, value in zip(keys[position : position + count], values[position : position + count]):
                leaf = arrays.describe(value, names.join(prefix, key))
                assert leaf is not None
                leaf.fenced = True
                leaves.append(leaf)
            position += count
        self._keys, self._values, self._counts = keys, values, counts
        self._cache.replace(leaves)
        self._leaves = self._cache.current

    def _scan_rest(self, odd: "list[int]", strangers: int) -> "tuple[list[Leaf], str]":
        """Hyperparameters, state that is not only tensors, and state that belongs to no parameter."""
        gatherer = tree.Gatherer({leaf.name: leaf for leaf in self._other.current})
        groups = []
        for position, group in enumerate(self.value.param_groups):
            values = {key: value for key, value in group.items() if key != "params"}
            encoded = typed.encode(values, "%s/group/%d" % (self._prefix, position), gatherer, self.allow_pickle)
            groups.append('{"params":%s,"set":%s}' % (self._parameter_texts[position], typed.to_text(encoded)))
        states = {}
        for position in odd:
            prefix = self._prefixes[position]
            states[prefix] = typed.encode(
                dict(self.value.state[self._parameters[position]]), prefix, gatherer, self.allow_pickle
            )
        other = None
        if strangers > 0:
            known = set(map(id, self._parameters))
            rest = {key: value for key, value in self.value.state.items() if id(key) not in known}
            other = typed.encode(rest, self._prefix + "/other", gatherer, self.allow_pickle)
        before = self._other.current
        if len(before) != len(gatherer.leaves) or not (
            tree.same_objects(before, gatherer.leaves) and self._other.reuse()
        ):
            # A known leaf may have been found stale only now: describe all of them again.
            fresh = tree.Gatherer()
            for leaf in gatherer.leaves:
                fresh(leaf.value, leaf.name)
            hyperparameters = self._prefix + "/group/"
            for leaf in fresh.leaves:
                # A scheduler may change a tensor learning rate between save and the optimizer's step.
                leaf.fenced = not leaf.name.startswith(hyperparameters)
            self._other.replace(fresh.leaves)
        if len(self._leaves) != len(self._cache.current) + len(self._other.current) or (
            self._other.current is not before
        ):
            self._leaves = self._cache.current + self._other.current
        text = '{"kind":"optimizer","groups":[%s],"odd":%s,"other":%s}' % (
            ",".join(groups), typed.to_text(states), typed.to_text(other)
        )
        return self._leaves, text

    # -- restoring --

    def plan(self, plan: Plan, state: Any) -> None:
        state = state or {"groups": [], "odd": {}, "other": None}
        whole = plan.wants_object(self._prefix)
        live = {leaf.name: leaf for leaf in self._cache.current + self._other.current}
        if whole:
            self._plan_groups(plan, state["groups"], live)
        below: "dict[str, list[str]]" = {}
        for name in plan.names_under(self._prefix + "/state/"):
            below.setdefault("/".join(name.split("/", 4)[:4]), []).append(name)
        stored_paths = {path for group in state["groups"] for path in group["params"]}
        for parameter, prefix in zip(self._parameters, self._prefixes):
            wanted = [name for name in below.get(prefix, ()) if plan.wants(name)]
            if whole and stored_paths and prefix.split("/", 2)[2] not in stored_paths:
                plan.missing.append("%s (a parameter that the stored optimizer does not have)" % prefix)
            elif prefix in state["odd"] and (whole or wanted):
                self._plan_odd(plan, parameter, prefix, state["odd"][prefix], live)
            elif wanted or whole:
                self._plan_state(plan, parameter, prefix, wanted, live, whole)
        if whole and state["other"] is not None:
            other = typed.decode(state["other"], self._prefix + "/other", plan.tree_leaf(live), plan.allow_pickle)
            plan.then(lambda: self.value.state.update(other))

    def _plan_groups(self, plan: Plan, stored: "list[Any]", live: "dict[str, Leaf]") -> None:
        groups = self.value.param_groups
        if len(stored) != len(groups):
            plan.mismatched.append(
                "%s: stored with %d parameter groups, here %d" % (self._prefix, len(stored), len(groups))
            )
            return
        for position, (group, entry) in enumerate(zip(groups, stored)):
            name = "%s/group/%d" % (self._prefix, position)
            if len(entry["params"]) != len(group["params"]):
                plan.mismatched.append(
                    "%s: stored with %d parameters, here %d" % (name, len(entry["params"]), len(group["params"]))
                )
            values = typed.decode(entry["set"], name, plan.tree_leaf(live), plan.allow_pickle)
            plan.then(lambda group=group, values=values: group.update(values))

    def _plan_odd(self, plan: Plan, parameter: Any, prefix: str, encoded: Any, live: "dict[str, Leaf]") -> None:
        values = typed.decode(encoded, prefix, plan.tree_leaf(live), plan.allow_pickle)
        plan.then(lambda: self._set(parameter, values))

    def _plan_state(self, plan: Plan, parameter: Any, prefix: str, wanted: "list[str]", live: "dict[str, Leaf]",
                    whole: bool) -> None:
        values = {} if whole else dict(self.value.state.get(parameter) or {})
        for name in wanted:
            stored = plan.find(name)
            assert stored is not None
            leaf = live.get(name)
            if leaf is None or leaf.dtype != stored.dtype or leaf.whole != stored.shape:
                leaf = plan.new(stored, "torch", like=parameter)
            plan.read_into(stored, leaf)
            values[names.unescape(name[len(prefix) + 1 :])] = leaf.value
        plan.then(lambda: self._set(parameter, values))

    def _set(self, parameter: Any, values: "dict[str, Any]") -> None:
        state = self.value.state
        entry = state.get(parameter)
        if not values:
            state.pop(parameter, None)
        elif entry is None:
            state[parameter] = values
        else:
            entry.clear()
            entry.update(values)
