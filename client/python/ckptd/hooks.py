# SPDX-License-Identifier: Apache-2.0
"""Calling the fence by itself before ``optimizer.step()``.

torch 2 has ``register_step_pre_hook``. Before that the instance's ``step`` is replaced by a wrapper, with two cares:

- Schedulers replace the instance's ``step`` too. One made before us left a plain function marked ``_with_counter``
  (or ``_wrapped_by_lr_sched``), which we wrap, marks included, so that no scheduler wraps again or warns. One made
  after us takes ``step.__self__`` and ``step.__func__``, so ours is a bound method wherever the original is one.
- A scheduler made after us keeps our wrapper inside its own. It cannot be taken out again; unhooking empties the
  list of callbacks that the wrapper runs, and puts the original back only if ours is still outermost.
"""
from __future__ import annotations

import functools
import types
import weakref
from typing import Any, Callable, Optional

_MARK = "_ckptd_callbacks"


def hook(optimizer: Any, callback: "Callable[[], Any]") -> "Callable[[], None]":
    """Runs `callback` (a bound method, held weakly) before every step of `optimizer`. Returns what undoes it, which
    may be called more than once."""
    reference = weakref.WeakMethod(callback)
    register = getattr(optimizer, "register_step_pre_hook", None)
    if register is not None:
        return register(lambda *_: _run(reference)).remove
    callbacks = getattr(getattr(optimizer, "step"), _MARK, None)
    if callbacks is None:
        callbacks = _wrap(optimizer)
    callbacks.append(reference)
    where = weakref.ref(optimizer)

    def undo() -> None:
        if reference in callbacks:
            callbacks.remove(reference)
        target = where()
        if target is not None and not callbacks:
            _unwrap(target, callbacks)

    return undo


def _run(reference: "weakref.WeakMethod[Any]") -> None:
    callback = reference()
    if callback is not None:
        callback()


def _wrap(optimizer: Any) -> "list[Any]":
    callbacks: "list[Any]" = []
    original = optimizer.step
    function: "Optional[Any]" = getattr(original, "__func__", None)

    if function is not None:

        @functools.wraps(function)
        def wrapper(self: Any, *arguments: Any, **keywords: Any) -> Any:
            for reference in tuple(callbacks):
                _run(reference)
            return function(self, *arguments, **keywords)

        step: Any = types.MethodType(wrapper, optimizer)
    else:

        @functools.wraps(original)
        def wrapper(*arguments: Any, **keywords: Any) -> Any:
            for reference in tuple(callbacks):
                _run(reference)
            return original(*arguments, **keywords)

        step = wrapper
    setattr(wrapper, _MARK, callbacks)
    setattr(wrapper, "_ckptd_original", original if "step" in vars(optimizer) else None)
    setattr(wrapper, "_ckptd_outermost", weakref.ref(wrapper))
    optimizer.step = step
    return callbacks


def _unwrap(optimizer: Any, callbacks: "list[Any]") -> None:
    step = vars(optimizer).get("step")
    wrapper = getattr(step, "__func__", step)
    if getattr(wrapper, _MARK, None) is not callbacks or wrapper._ckptd_outermost() is not wrapper:
        return
    if wrapper._ckptd_original is None:
        del optimizer.step
    else:
        optimizer.step = wrapper._ckptd_original
