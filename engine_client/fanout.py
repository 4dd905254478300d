"""A fan-out: one utility call sent to each target engine, settled as a whole.

The order of a call, and why it is safe to interrupt anywhere:

1. Everything is checked and encoded.  What cannot be sent is refused before any engine hears of it.
2. The call is registered: one waiter per engine.  If a target is known dead the whole call is
   refused here, and nothing is sent.
3. It goes to the outbox as one unit, so that all engines see concurrent fan-outs in one order, and
   a lockstep group never has a member that was told while another is waited for.
4. The caller blocks on the call's latch until the last engine has settled, or until the deadline.
5. ``finally`` does one thing, a single C call: it appends the call to the abandoned ones.  An
   interrupt can fall before or after it but not into it; whoever next looks unregisters the call.
6. The caller drains that deque itself, so that it alone holds the futures; it settles what is left
   with ``CallTimeout`` and reads them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from threading import TIMEOUT_MAX
from typing import Any

from engine_client import _render
from engine_client.deadline import Deadline
from engine_client.dispatch.dispatcher import Dispatcher
from engine_client.dispatch.waiting import SLICE, PendingCall
from engine_client.engines import Targets, engine_names, resolve_targets
from engine_client.errors import (
    AbandonedError,
    CallTimeout,
    NotSentError,
    RemoteError,
    RequestRefusedError,
    UtilityCallError,
)
from engine_client.outcome import Outcomes
from engine_client.wire.codec import codec_named, plain
from engine_client.wire.messages import UtilityRequest

__all__ = ["LOCKSTEP_ONLY_TOGETHER", "check_method", "note_one_list", "settle"]

logger = logging.getLogger("engine_client")

LOCKSTEP_ONLY_TOGETHER = frozenset(
    {"pause_scheduler", "resume_scheduler", "sleep", "wake_up", "execute_dummy_batch", "barrier"}
)
"""Methods that contain a collective (``wake_up`` resumes the scheduler): a member of a lockstep
group that gets one alone waits for the others, and answers nothing any more (seen with vLLM
0.32)."""


def check_method(method: object) -> str:
    """The name of a utility method.

    Raises:
        TypeError: not a string.
        ValueError: empty.
    """
    if not isinstance(method, str):
        hint = ""
        if isinstance(method, (list, tuple)) and method and isinstance(method[0], str):
            shown = ", ".join(_render.one_line(repr(item), 30) for item in method[:4])
            hint = f"; pass name and arguments one by one: call_utility({shown})"
        raise TypeError(
            f"method must be the name of a utility method, "
            f"not {_render.one_line(method, 60)} ({type(method).__name__}){hint}"
        )
    if not method:
        raise ValueError("method is empty: name a utility method, such as 'is_sleeping'")
    return method


def note_one_list(error: UtilityCallError, method: str, args: Sequence[Any]) -> None:
    """Note on the failure of a call with one list what its author may have meant."""
    if len(args) != 1 or not isinstance(args[0], (list, tuple)):
        return
    texts = [str(e) for e in error.outcomes.failures.values() if isinstance(e, RemoteError)]
    if any("argument" in text for text in texts):
        shown = ", ".join(_render.one_line(repr(item), 30) for item in args[0][:4])
        more = ", ..." if len(args[0]) > 4 else ""
        error.add_note(
            f"{method} was called with one argument, a list; several arguments are passed one by "
            f"one: call_utility({method!r}{shown and ', '}{shown}{more})"
        )


def settle(
    dispatcher: Dispatcher,
    method: str,
    args: Sequence[Any],
    *,
    engines: Targets,
    timeout: float | None,
    each: bool = False,
    unwaited: Collection[int] = (),
) -> Outcomes:
    """Send one utility call to each target and wait until all have settled.

    Args:
        dispatcher: of the client.
        method: what to call.
        args: positional arguments.
        engines: the targets.
        timeout: seconds for all of it; None for no limit.
        each: refuse targets one by one; otherwise one that is known dead refuses all.
        unwaited: targets that are sent the call and not waited for.

    Returns:
        Every target's outcome, in target order.

    Raises:
        TypeError, ValueError: an argument that cannot be meant; nothing was sent.
        EncodeError: an argument that cannot be sent; nothing was sent.
        RequestRefusedError: the call would wedge a lockstep group; nothing was sent.
        ClientClosedError, ClientBrokenError: the client ended; ``outcomes`` if it was under way.
    """
    # IPython and pytest leave such frames out, so that a traceback shows the caller's line and what
    # happened to the call, not how a call works.
    __tracebackhide__ = True
    deadline = Deadline(timeout)
    check_method(method)
    dispatcher.check_usable()
    registry = dispatcher.registry
    targets = resolve_targets(engines, tuple(registry.engines))
    if targets is None:
        # With no engine alive, each one's death is the answer.
        targets = registry.alive() or tuple(registry.engines)
    wedged = _would_wedge(dispatcher, method, targets)
    if wedged and not each:
        raise RequestRefusedError(wedged)
    call = _encode(dispatcher, method, args, targets, deadline)
    for index in call.targets if wedged or unwaited else ():
        if wedged:
            call.refused.add(index)
            call.fail(index, NotSentError(wedged, engine=index), call.started)
        elif index in unwaited and registry.engines[index].alive:
            error = AbandonedError(
                f"{method} was sent to engine {index}, which has not answered an earlier call, "
                f"and not waited for",
                engine=index,
            )
            call.fail(index, error, call.started)
    if not targets or wedged:
        return call.outcomes()
    registered = False
    try:
        try:
            registered = registry.add(call, each=each)
            if registered:
                call.handed_over = True
                limit = _first_limit(dispatcher, deadline)
                moment = limit if 0 <= limit < SLICE else SLICE
                poke, block = dispatcher.outbox.wakeup.poke, call.latch.block
                waits = bool(call.waiting)
                # When the outbox is closed already, the end of the client settles the call.
                if dispatcher.outbox.put(call):
                    poke()
                # Nothing comes between: the dispatcher wants the GIL now, and if it is not let go
                # before the dispatcher has woken, that goes to sleep again until it is.
                if waits and not block(True, moment):
                    _wait_on(dispatcher, call, limit)
        finally:
            registry.abandoned.append(call)
        registry.drain()
        never_taken = not registered and bool(call.waiting)
        now = time.monotonic()
        for index in tuple(call.waiting):
            call.fail(index, _timeout_error(dispatcher, call, index), now)
        outcomes = call.outcomes()
    except BaseException as exc:
        _report_interrupt(dispatcher, call, exc)
        raise
    if never_taken:
        raise dispatcher.ended_error()
    if call.ended and not outcomes.all_ok:
        ended = dispatcher.ended_error(
            f"{engine_names(outcomes.unsettled)} replied to {method} (see .outcomes)"
        )
        ended.outcomes = outcomes
        raise ended
    return outcomes


def _would_wedge(dispatcher: Dispatcher, method: str, targets: Sequence[int]) -> str | None:
    if method not in LOCKSTEP_ONLY_TOGETHER:
        return None
    group = [i for i, engine in dispatcher.registry.engines.items() if engine.in_lockstep]
    left_out = set(group).difference(targets)
    if not left_out or len(left_out) == len(group):
        return None
    return (
        f"{method} must go to the whole lockstep group ({engine_names(group)}): alone, an engine "
        f"waits for the others and answers nothing any more; leave engines= out"
    )


def _encode(
    dispatcher: Dispatcher,
    method: str,
    args: Sequence[Any],
    targets: Sequence[int],
    deadline: Deadline,
) -> PendingCall:
    """Check and encode a call, once per dialect (and layout, where that matters) of its targets."""
    engines = dispatcher.registry.engines
    checked = plain(list(args), "args") if args else []
    if not method.isascii():
        plain(method, "method")
    call_id = next(dispatcher.call_ids)
    payloads: dict[str, bytes] = {}
    encoded: dict[tuple[str, bool], bytes] = {}
    for index in targets:
        engine = engines[index]
        form, codec = engine.form, engine.codec
        if form in payloads or codec is None:
            continue
        laid = engine.layout.arguments(method, checked)
        key = codec, laid is checked
        if key not in encoded:
            client_index = dispatcher.config.client_index
            request = UtilityRequest(client_index, call_id, method, laid).to_plain()
            encoded[key] = codec_named(codec).encode(request)
        payloads[form] = encoded[key]
    call = PendingCall(call_id, method, targets, payloads, deadline, time.monotonic())
    if method in ("add_lora", "remove_lora"):
        call.lora = _lora_id(method, checked)
    return call


def _lora_id(method: str, args: list[Any]) -> int | None:
    first = args[0] if args else None
    if method == "add_lora" and isinstance(first, list) and len(first) > 1:
        first = first[1]
    return first if isinstance(first, int) else None


def _first_limit(dispatcher: Dispatcher, deadline: Deadline) -> float:
    """Seconds to block for: to the deadline, or until a warning is due; as a lock takes them."""
    interval = dispatcher.config.slow_call_warning
    if deadline.timeout is not None or interval is None:
        return deadline.lock_timeout()
    return min(interval, TIMEOUT_MAX)


def _wait_on(dispatcher: Dispatcher, call: PendingCall, limit: float) -> None:
    """Having blocked for a moment: block until the first limit; warn, unless that was the deadline,
    and block again.
    """
    __tracebackhide__ = True
    # By the clock: a signal handler, or a stop of the process, may have made the moment long.
    if not 0 <= limit < SLICE and call.latch.wait(
        call.deadline.lock_timeout(limit - SLICE if limit > 0 else None)
    ):
        return
    interval = dispatcher.config.slow_call_warning
    if call.deadline.timeout is not None or interval is None:
        return
    while True:
        waiting, failures = dispatcher.registry.progress(call)
        known = "; ".join(f"engine {i} has failed already: {e}" for i, e in failures.items())
        logger.warning(
            "%s has been waiting without a time limit for %.0f s for %s%s",
            call.method,
            time.monotonic() - call.started,
            engine_names(waiting),
            f"; {known}" if known else "",
        )
        interval = min(2 * interval, TIMEOUT_MAX)
        if call.latch.wait(interval):
            return


def _timeout_error(dispatcher: Dispatcher, call: PendingCall, index: int) -> CallTimeout:
    if call.deadline.timeout is None:  # the client had ended before the call; replaced by that
        return CallTimeout(engine=index)
    busy = ""
    earlier = dispatcher.registry.oldest_unanswered(index)
    if earlier is not None and earlier.call_id != call.call_id:
        age = time.monotonic() - earlier.started
        busy = f"; it has not answered {earlier.method} either, sent {age:.3g} s ago"
    return CallTimeout(
        f"engine {index} did not reply to {call.method} within {call.deadline.timeout:g} s "
        f"(timeout=){busy}; it may still run it",
        engine=index,
    )


def _report_interrupt(dispatcher: Dispatcher, call: PendingCall, exc: BaseException) -> None:
    """Say on the exception which engines had settled and which may still run the call."""
    dispatcher.outbox.wakeup.poke()  # it may have come between the put and its poke
    dispatcher.registry.drain()
    now = time.monotonic()
    for index in tuple(call.waiting):
        error = AbandonedError(
            f"the caller was interrupted ({type(exc).__name__}) before engine {index} replied to "
            f"{call.method}",
            engine=index,
            may_have_run=call.handed_over,
        )
        call.fail(index, error, now)
    outcomes = call.outcomes()
    left = outcomes.unsettled
    settled = [index for index in outcomes if index not in left]
    note = f"{call.method}: "
    note += f"{engine_names(settled)} had settled" if settled else "no engine had settled"
    if left:
        verb = "may still run it" if call.handed_over else "it was not sent"
        note += f"; {engine_names(left)}: {verb}"
    with suppress(Exception):  # an exception class of the caller's may refuse attributes
        exc.add_note(f"{note} (see .outcomes)")
        exc.outcomes = outcomes  # type: ignore[attr-defined]
