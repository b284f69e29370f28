# SPDX-License-Identifier: Apache-2.0
"""`Checkpointer`: objects in, versions out."""
from __future__ import annotations

import contextlib
import json
import os
import threading
import weakref
from typing import Any, Iterator, Mapping, Optional, Sequence, Union

from . import arrays, binding, collective, devices, hooks, levels, names, plain, plan, rng, typed
from .binding import Handle
from .errors import CheckpointError, RestoreMismatch
from .levels import Durable, Info, Level, LevelLike, SaveResult, Version
from .module import ModuleSource
from .optimizer import OptimizerSource
from .registry import Registry
from .watchdog import Doubling, DurabilityWatch, log

#: Version of the inline state's JSON.
STATE_FORMAT = 1

#: Results of a save that are the program's fault and never go away by themselves. So is a limit, but only at the first
#: save: a job that ran for days is not ended by it.
_PROGRAMMER = (binding.E_INVALID, binding.E_EXISTS, binding.E_FORKED, binding.E_MISMATCH)


class Checkpointer:
    """Saves the state of `objects` without blocking, and restores it.

    ``job`` names the job. Objects are given by keyword, or as a mapping ``objects=`` where a name is no identifier or is
    one of the options. Each is a module, an optimizer, anything with ``state_dict`` and ``load_state_dict`` (schedulers,
    scalers, data loaders), a dict, list or other container, an array (torch, numpy, ``__array_interface__``, DLPack,
    writable buffers), or a plain value (which lives in `values`, by name). `ckptd.fenced`, `ckptd.rank_local` and
    `ckptd.shard` say more about an object or array. TypeError names the path of what cannot be stored.

    Objects and tensors are held strongly until `close`.

    - ``rank``, ``world``, ``run_id``: this process among its job's; by default from torch.distributed, else 0 of 1.
    - ``directory``: where global checkpoints go; ``socket``, ``daemon``: of the service (see ckpt.h for all defaults).
    - ``max_unsaved``: seconds without a durable version before ``on_unsaved`` (``"warn"`` or ``"raise"``); 0: never.
    - ``hook``: fence by itself before each ``optimizer.step()``.
    - ``fence_timeout``, ``open_timeout``, ``busy_timeout``: seconds a fence, the opening, and a save for room may take.
    - ``on_failure``: ``"log"`` failed saves and fences to the logger ``ckptd``, or ``"raise"`` CheckpointError.
    - ``replicated``: with several ranks, tensors (other than DTensors and shards) are equal on all and stored once;
      False: each rank stores its own.
    - ``rng``: random number generators are saved and restored too, under the object name ``rng``.
    - ``allow_pickle``: values that typed JSON lacks are pickled; reading them back runs what the file says.

    A checkpointer may be used from several threads, one call at a time.
    """

    def __init__(
        self,
        job: str,
        *,
        rank: Optional[int] = None,
        world: Optional[int] = None,
        run_id: Optional[str] = None,
        directory: "Optional[str | os.PathLike[str]]" = None,
        socket: "Optional[str | os.PathLike[str]]" = None,
        daemon: "Optional[str | os.PathLike[str]]" = None,
        max_unsaved: float = 1800.0,
        on_unsaved: str = "warn",
        on_failure: str = "log",
        hook: bool = True,
        fence_timeout: float = 60.0,
        open_timeout: float = 90.0,
        busy_timeout: float = 1.0,
        replicated: bool = True,
        rng: bool = True,
        allow_pickle: bool = False,
        objects: "Optional[Mapping[str, Any]]" = None,
        **more_objects: Any,
    ):
        if on_failure not in ("log", "raise"):
            raise ValueError('on_failure is "log" or "raise", not %r' % (on_failure,))
        self._handle: Any = None
        self._undo: "list[Any]" = []
        self._undo_watch: Any = None
        self._lock = threading.RLock()
        self._process = os.getpid()
        #: The immutable objects by name: read after `restore`, assign before `save`.
        self.values: "dict[str, Any]" = {}
        self.fence_timeout = fence_timeout
        self._on_failure = on_failure
        self._rng = rng
        self._allow_pickle = allow_pickle
        self._pending: Optional[int] = None
        self._checking = False
        self._last_step: Optional[int] = None
        self._saves, self._fences = Doubling("checkpoint not saved"), Doubling("checkpoint lost")
        self._watch = DurabilityWatch(max_unsaved, on_unsaved)
        rank, world, run_id = collective.identify(rank, world, run_id)
        self._rank = rank
        self._registry = Registry(rank, world, replicated)
        self._sources: "list[tuple[Any, bool]]" = []
        self._module_revision = -1
        for name, value in {**(objects or {}), **more_objects}.items():
            self._add(name, value)
        scanned, _ = self._scan()
        self._handle = Handle(
            job, rank, world, run_id, _path(directory), _path(socket), _path(daemon), open_timeout, busy_timeout
        )
        self._finalizer = weakref.finalize(self, _finalize, self._handle, self._process)
        self._durable_level = min(
            (level for level in levels.level_set(self._handle.info().levels) if level >= Level.LOCAL), default=None
        )
        if hook:
            self.hook()
        self._watch_devices(scanned)

    # -- objects --

    def _add(self, name: str, value: Any) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError("an object's name is a non-empty string, not %r" % (name,))
        if name == "rng" and self._rng:
            raise ValueError("the object name rng is the generators'; choose another name or pass rng=False")
        fenced = local = False
        while isinstance(value, (arrays.fenced, arrays.rank_local)):
            fenced = fenced or isinstance(value, arrays.fenced)
            local = local or isinstance(value, arrays.rank_local)
            value = value.value
        source: Any
        if plain.is_module(value):
            source = ModuleSource(name, value, self._allow_pickle)
        elif plain.is_optimizer(value):
            source = OptimizerSource(name, value, self._allow_pickle)
        elif plain.is_stateful(value) and arrays.describe(value, name) is None:
            source = plain.StatefulSource(name, value, self._allow_pickle)
            local = local or not plain.is_shared(value)
        else:
            source = plain.PlainSource(name, value, fenced, self._allow_pickle, self.values)
        self._sources.append((source, local))

    def _scan(self) -> "tuple[list[tuple[list[arrays.Leaf], bool]], str]":
        """Every object's leaves, and the inline state's text. Modules first: they name the optimizers' parameters."""
        scanned: "dict[str, list[arrays.Leaf]]" = {}
        texts: "dict[str, str]" = {}
        for source, _ in self._sources:
            if source.kind == "module":
                scanned[source.name], texts[source.name] = source.scan()
        revision = sum(source.revision for source, _ in self._sources if source.kind == "module")
        if revision != self._module_revision:
            self._module_revision = revision
            self._name_parameters()
        for source, _ in self._sources:
            if source.kind != "module":
                scanned[source.name], texts[source.name] = source.scan()
        parts = ["%s:%s" % (json.dumps(source.name), texts[source.name]) for source, _ in self._sources]
        text = '{"ckptd":%d,"objects":{%s}' % (STATE_FORMAT, ",".join(parts))
        if self._rng:
            text += ',"rng":' + typed.dumps(rng.take())
        return [(scanned[source.name], local) for source, local in self._sources], text + "}"

    def _name_parameters(self) -> None:
        owners: "dict[int, tuple[str, str, Any]]" = {}
        for source, _ in self._sources:
            if source.kind == "module":
                for identity, (key, parameter) in source.parameters().items():
                    owners.setdefault(identity, (source.name, key, parameter))

        def naming(parameter: Any) -> "Optional[tuple[str, str]]":
            found = owners.get(id(parameter))
            return found[:2] if found is not None else None

        for source, _ in self._sources:
            if source.kind == "optimizer":
                source.naming = naming
                source.renamed()

    def hook(self) -> None:
        """Fences by itself before every step of the optimizers among the objects. Repeating it changes nothing."""
        if not self._undo:
            self._undo = [
                hooks.hook(source.value, self._fence_hook) for source, _ in self._sources if source.kind == "optimizer"
            ]

    def unhook(self) -> None:
        """Undoes `hook`: the optimizers are as they were."""
        for undo in self._undo:
            undo()
        self._undo = []

    # -- device memory --

    @contextlib.contextmanager
    def quiet(self) -> "Iterator[None]":
        """Keeps the service's copies out of GPU memory away while the body runs (a collective, say), for at most two
        seconds."""
        with self._lock:
            handle = self._open_handle()
            handle.quiet(True)
        try:
            yield
        finally:
            with self._lock:
                if handle.is_open:
                    handle.quiet(False)

    def release_imports(self) -> None:
        """Has the service close the GPU memory that it has open, so that it can go back to the driver; the next save
        opens what it needs. Called by itself before ``torch.cuda.empty_cache()`` and, where torch tells of it, out of
        memory."""
        with self._lock:
            if self._handle is not None and self._handle.is_open and os.getpid() == self._process:
                self._handle.release_imports()

    def device_usage(self) -> "levels.DeviceUsage":
        """What the service takes of GPU memory; what is protected is made known to it first."""
        with self._lock:
            handle = self._open_handle()
            self.fence()
            scanned, _ = self._scan()
            self._registry.update(handle, scanned)
            raw = handle.device_usage()
            return levels.DeviceUsage(
                raw.contexts, raw.imports, raw.context_bytes, raw.import_bytes, raw.arena_bytes
            )

    def _watch_devices(self, scanned: "list[tuple[list[arrays.Leaf], bool]]") -> None:
        if any(leaf.device is not None and leaf.device[0] == "torch" for leaves, _ in scanned for leaf in leaves):
            self._undo_watch = devices.watch(self.release_imports)

    def _fence_hook(self) -> None:
        if self._pending is not None and os.getpid() == self._process:
            self.fence()

    # -- saving --

    def save(self, step: int, *, to: Optional[LevelLike] = None, urgent: bool = False, check: bool = False) -> SaveResult:
        """Takes a version of all objects for `step`, which is greater than those before. Returns at once; parameters,
        optimizer state and `fenced` objects must not change before the fence, all else may.

        ``to``: the deepest level wanted. ``urgent``: wait instead of skipping, before preemption. ``check``: the fence
        looks whether the memory changed after all, and drops the version if so. CheckpointError for the program's
        mistakes; what storage or the daemon do wrong is logged (see ``on_failure``).
        """
        with self._lock:
            handle = self._open_handle()
            if not isinstance(step, int) or isinstance(step, bool) or step < 0:
                raise ValueError("a step is an integer from 0, not %r" % (step,))
            depth = 0 if to is None else int(Level.of(to))
            if self._pending is not None:
                self.fence()
            scanned, text = self._scan()
            try:
                changed = self._registry.update(handle, scanned)
                self._registry.hold()
                slowly = urgent or changed or self._registry.large_eager or self._saves.count > 0
                result = handle.save(step, text.encode("ascii"), depth, urgent, check, slowly, self._registry.streams())
            except CheckpointError as error:
                self._registry.release()
                self._report(self._saves, step, error)
                outcome = SaveResult.FAILED
            except BaseException:
                # Interrupted: whether the step was accepted is unknown, so it counts as if it had been.
                self._pending = step
                raise
            else:
                outcome = (SaveResult.SAVED, SaveResult.SKIPPED, SaveResult.ALREADY)[result]
            if outcome is SaveResult.SAVED:
                self._pending = self._last_step = step
                self._checking = check
                self._saves.succeeded()
            elif outcome is not SaveResult.FAILED:
                self._registry.release()
                if outcome is SaveResult.SKIPPED:
                    self._saves.failed("step %d was skipped, because there was no room for it in time" % step)
            self._watch.check(self._durable_age)
            return outcome

    def _report(self, doubling: Doubling, step: int, error: CheckpointError) -> None:
        too_much = error.code == binding.E_LIMIT and self._last_step is None
        if self._on_failure == "raise" or error.code in _PROGRAMMER or too_much:
            raise error
        doubling.failed("step %d: %s" % (step, error))

    def _durable_age(self) -> Optional[float]:
        if self._durable_level is None:
            return None
        try:
            durable = self._handle.last_durable(self._durable_level)
        except CheckpointError:
            return None
        return None if durable is None else durable.age_ms / 1000

    def fence(self, timeout: Optional[float] = None) -> bool:
        """Waits until the last save is captured: afterwards everything may change. True if it was (or there was none);
        False if that version is lost, which is logged. Default deadline: ``fence_timeout``, seconds."""
        with self._lock:
            if self._pending is None:
                return True
            handle, step = self._open_handle(), self._pending
            try:
                handle.fence(step, self.fence_timeout if timeout is None else timeout)
            except CheckpointError as error:
                self._fenced()
                self._report(self._fences, step, error)
                return False
            self._fenced()
            self._fences.succeeded()
            return True

    def _fenced(self) -> None:
        self._pending = None
        self._registry.release()

    def wait(self, level: LevelLike, step: Optional[int] = None, timeout: float = 600.0, *, part: bool = False) -> bool:
        """Waits until `step` (default: the last one saved) is complete at `level`, or with ``part`` this rank's part of
        it. False: it never will be, because a newer one took its place or it was not asked to go there.
        DeadlinePassed after `timeout` seconds."""
        with self._lock:
            handle = self._open_handle()
            wanted = self._last_step if step is None else step
            if wanted is None:
                raise ValueError("nothing was saved yet; name a step")
            if self._checking and self._pending == wanted:
                self.fence()  # the second look is taken at the fence, and nothing is durable before it
            scope = binding.PART if part else binding.VERSION
            return handle.wait(wanted, int(Level.of(level)), scope, timeout) == binding.OK

    def last_durable(self, level: LevelLike) -> Optional[Durable]:
        """The newest version that is complete at `level`, or None."""
        with self._lock:
            durable = self._open_handle().last_durable(int(Level.of(level)))
            return None if durable is None else Durable(durable.generation, durable.step, durable.age_ms / 1000)

    def versions(self) -> "list[Version]":
        """The job's complete versions, newest first."""
        with self._lock:
            return [levels.version(entry) for entry in self._open_handle().versions()]

    @property
    def info(self) -> Info:
        with self._lock:
            return levels.info(self._open_handle().info())

    # -- restoring --

    def restore(
        self,
        step: "Union[int, str]" = "latest",
        generation: Optional[int] = None,
        *,
        strict: bool = True,
        convert: bool = False,
        only: "Optional[Union[str, Sequence[str]]]" = None,
        timeout: float = 600.0,
    ) -> Optional[int]:
        """Brings a version into the objects, in place; returns its step, or None if the job has no version.

        ``"latest"`` is, before the first save, the version that this run resumes from. Names, shapes and dtypes of
        everything are checked before anything changes: RestoreMismatch lists all that does not fit. ``strict=False``:
        missing and unexpected names are logged instead. ``convert``: element types may differ. ``only``: glob patterns
        over object names and tensor names (the generators' name is ``rng``).

        With another number of ranks, tensors are found by name. What is a rank's own comes from the same rank's part;
        a rank that wrote none takes schedulers and plain values from rank 0 and leaves its data loaders, `rank_local`
        objects and generators as they are, which is logged. CheckpointError with code E_DAMAGED: versions exist, but
        none is usable.
        """
        with self._lock:
            handle = self._open_handle()
            self.fence()
            which, number = binding.RESTORE_LATEST, 0
            if step != "latest":
                if not isinstance(step, int):
                    raise ValueError('a step is an integer or "latest", not %r' % (step,))
                which, number = (binding.RESTORE_STEP if generation is None else binding.RESTORE_EXACT), step
            elif generation is not None:
                raise ValueError("a generation needs a step")
            opened = handle.restore(which, generation or 0, number, timeout)
            if opened is None:
                return None
            with opened:
                return self._restore(opened, strict, convert, [only] if isinstance(only, str) else only)

    def _restore(self, opened: binding.Restore, strict: bool, convert: bool, only: "Optional[Sequence[str]]") -> int:
        self._scan()
        info = opened.info()
        newcomer = self._rank >= info.world
        state = _parse_state(opened.state(0 if newcomer else self._rank))
        stored = (plan.Stored(name, dtype, shape, bool(flags & binding.RANK_LOCAL), rank)
                  for name, dtype, shape, flags, rank in opened.tensors(info.tensors))
        work = plan.Plan(stored, self._rank, newcomer, convert, only, self._allow_pickle)
        known = []
        for source, local in self._sources:
            prefix = names.escape(source.name)
            known.append(prefix)
            if local and newcomer:
                if work.wants_object(prefix):
                    log.warning("%s: rank %d stored none, so it stays as it is", prefix, self._rank)
                work.skip(work.names_under(prefix + "/") + [prefix])
                continue
            entry = state["objects"].get(source.name)
            if entry is not None and entry["kind"] != source.kind:
                work.mismatched.append("%s: stored as a %s, here a %s" % (prefix, entry["kind"], source.kind))
                work.skip(work.names_under(prefix + "/") + [prefix])
                continue
            source.plan(work, entry)
        work.finish(known)
        for name in state["objects"]:
            if names.escape(name) not in known and work.wants_object(names.escape(name)):
                work.unexpected.append("%s (no such object here)" % names.escape(name))
        self._plan_rng(work, state, newcomer)
        self._judge(work, strict, info.step, known)
        work.execute(opened)
        work.apply()
        return info.step

    def _plan_rng(self, work: plan.Plan, state: Any, newcomer: bool) -> None:
        if not self._rng or not work.wants_object("rng"):
            return
        if newcomer or "rng" not in state:
            log.warning("rng: none is stored for rank %d, so the generators stay as they are", self._rank)
            return
        generators = typed.decode(state["rng"], "rng", None, self._allow_pickle)
        work.then(lambda: rng.put(generators))

    def _judge(self, work: plan.Plan, strict: bool, step: int, known: "list[str]") -> None:
        problems = list(work.mismatched)
        loose = ["%s: missing in the stored version" % name for name in work.missing]
        loose += ["%s: stored, but unexpected here" % name for name in work.unexpected]
        if strict:
            problems += loose
        elif loose:
            log.warning("restoring step %d in part: %s", step, "; ".join(loose))
        problems += [
            "only=%r matches nothing" % pattern for pattern in work.patterns_without_match(known + ["rng"])
        ]
        if problems:
            raise RestoreMismatch(
                "step %d does not fit, nothing was changed:\n  %s" % (step, "\n  ".join(problems)), problems
            )

    # -- the end --

    def _open_handle(self) -> Handle:
        if self._handle is None or not self._handle.is_open:
            raise ValueError("the checkpointer is closed")
        return self._handle

    def close(self) -> bool:
        """Fences, unhooks and says goodbye; versions already captured go on to storage. True unless the last version
        is lost. May be repeated."""
        with self._lock:
            if self._handle is None or not self._handle.is_open:
                return True
            captured = self.fence() if os.getpid() == self._process else True
            self.unhook()
            if self._undo_watch is not None:
                self._undo_watch()
            self._finalizer.detach()
            _finalize(self._handle, self._process)
            return captured

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def _finalize(handle: Handle, process: int) -> None:
    """Also at the interpreter's exit, so that a last save is captured before the memory goes."""
    if os.getpid() != process:
        handle.abandon()
        return
    try:
        handle.close()
    except CheckpointError as error:
        log.warning("closing: %s", error)


def _path(path: "Optional[str | os.PathLike[str]]") -> Optional[str]:
    return None if path is None else os.fspath(path)


def _parse_state(text: bytes) -> "dict[str, Any]":
    if not text:
        return {"objects": {}}
    try:
        state = json.loads(text)
        version = state["ckptd"]
    except (ValueError, KeyError, TypeError):
        return {"objects": {}}
    if version > STATE_FORMAT:
        raise CheckpointError(
            "the stored state has format %s, this package reads up to %d; install a newer ckptd" % (version, STATE_FORMAT),
            binding.E_VERSION, "CKPT_E_VERSION",
        )
    return state
