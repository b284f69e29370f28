# SPDX-License-Identifier: Apache-2.0
"""Modules: every entry of state_dict() under its own key.

Parameters are fence-protected, because only the optimizer changes them; buffers change in forward passes and are
copied inside save. Entries that state_dict hooks or `get_extra_state` make anew are taken at every save and
come back through load_state_dict.
"""
from __future__ import annotations

from typing import Any, Optional

from . import arrays, names, tree, typed
from .arrays import Leaf
from .plan import Plan

_REFUSED = {
    "FullyShardedDataParallel": "FSDP's flat parameters are not supported yet; use fully_shard (DTensor) or DDP",
    "DeepSpeedEngine": "DeepSpeed's partitioned parameters are not supported; give its module and optimizer if unpartitioned",
}


class _Watch:
    """The dictionaries of all submodules as they were: comparing them is far cheaper than state_dict()."""

    def __init__(self, module: Any):
        self.entries = []
        for part in module.modules():
            for table in (part._parameters, part._buffers, part._modules):
                self.entries.append((table, list(table.keys()), list(table.values())))
            hidden = part._non_persistent_buffers_set
            self.entries.append((hidden, list(hidden), None))

    def unchanged(self) -> bool:
        for table, keys, values in self.entries:
            if len(table) != len(keys) or list(table) != keys:
                return False
            if values is not None and not tree.same_objects(table.values(), values):
                return False
        return True


class ModuleSource:
    kind = "module"

    def __init__(self, name: str, module: Any, allow_pickle: bool):
        self.name = name
        self.value = module
        self.allow_pickle = allow_pickle
        self.revision = 0
        self._prefix = names.escape(name)
        self._cache = tree.LeafCache()
        self._stages = tree.Stages()
        self._watch: "Optional[_Watch]" = None
        self._keys: "dict[str, Leaf]" = {}
        self._made: "list[str]" = []
        self._leaves: "list[Leaf]" = []
        self._extra_leaves: "list[Leaf]" = []
        for path, part in module.named_modules():
            reason = _REFUSED.get(type(part).__name__)
            if reason:
                raise TypeError("%s: %s" % (names.join(self._prefix, path) if path else self._prefix, reason))

    def parameters(self) -> "dict[int, tuple[str, Any]]":
        """id(parameter) to (state_dict key, parameter), the first key where tied."""
        found: "dict[int, tuple[str, Any]]" = {}
        for key, leaf in self._keys.items():
            if leaf.fenced:
                found.setdefault(id(leaf.value), (key, leaf.value))
        for key, parameter in self.value.named_parameters():
            found.setdefault(id(parameter), (key, parameter))
        return found

    def scan(self) -> "tuple[list[Leaf], str]":
        """The leaves (the same list as before if nothing changed) and the JSON text of the rest."""
        if self._watch is None or not self._watch.unchanged() or not self._cache.reuse():
            self._rebuild()
        if not self._made:
            return self._leaves, '{"kind":"module"}'
        return self._scan_made()

    def _rebuild(self) -> None:
        module = self.value
        self.revision += 1
        parameters = list(module.parameters())
        parameter_ids, buffer_ids = set(map(id, parameters)), set(map(id, module.buffers()))
        self._keys, self._made = {}, []
        for key, value in module.state_dict(keep_vars=True).items():
            if id(value) not in parameter_ids and id(value) not in buffer_ids:
                self._made.append(key)
                continue
            leaf = arrays.describe(value, names.join(self._prefix, key))
            if leaf is None:
                self._made.append(key)
                continue
            leaf.fenced = id(value) in parameter_ids
            self._keys[key] = leaf
        self._cache.replace(list(self._keys.values()))
        self._leaves = self._cache.current
        self._extra_leaves = []
        self._watch = _Watch(module)

    def _scan_made(self) -> "tuple[list[Leaf], str]":
        values = self.value.state_dict(keep_vars=True)
        gatherer = tree.Gatherer()
        extra = {
            key: typed.encode(values[key], names.join(self._prefix, key), gatherer, self.allow_pickle)
            for key in self._made
        }
        made = [self._stages.put(leaf) for leaf in gatherer.leaves]
        if [leaf.identity() for leaf in made] != [leaf.identity() for leaf in self._extra_leaves]:
            self._extra_leaves = made
            self._leaves = self._cache.current + made
        return self._leaves, '{"kind":"module","extra":%s}' % typed.to_text(extra)

    def plan(self, plan: Plan, state: Any) -> None:
        for leaf in self._cache.current:
            if plan.wants(leaf.name):
                plan.read(leaf)
        extra = (state or {}).get("extra", {})
        wanted = [key for key in self._made if plan.wants(names.join(self._prefix, key))]
        made = {}
        for key in wanted:
            name = names.join(self._prefix, key)
            if key not in extra:
                plan.missing.append(name)
                continue
            made[key] = typed.decode(extra[key], name, plan.tree_leaf({}), plan.allow_pickle)
        plan.unexpected.extend(
            names.join(self._prefix, key) for key in extra
            if key not in self._made and plan.wants(names.join(self._prefix, key))
        )
        if made:
            plan.then(lambda: self._load_made(made))

    def _load_made(self, made: "dict[str, Any]") -> None:
        self.value.load_state_dict(made, strict=False)
