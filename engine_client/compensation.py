"""Undoing a change that only some engines applied.

The undo goes to the engines that may have run the call, each for itself: a dead engine does not
keep the others from being undone.  Engines handle their messages in order, so an undo that is sent
after a call that timed out arrives after it.
"""

from __future__ import annotations

from engine_client._render import shown
from engine_client.dispatch.dispatcher import Dispatcher
from engine_client.engines import engine_names
from engine_client.errors import (
    ClientBrokenError,
    ClientClosedError,
    NotSentError,
    UtilityCallError,
)
from engine_client.fanout import check_method, settle
from engine_client.outcome import Failed, Outcomes, UtilityCall
from engine_client.wire.codec import plain

__all__ = ["check_undo", "raise_undone", "undo"]


def check_undo(call: object, name: str = "compensate") -> UtilityCall | None:
    """The undo call of a ``compensate=`` argument, checked before anything is sent.

    Args:
        call: the argument.
        name: how its caller knows it.

    Raises:
        TypeError: neither None nor a UtilityCall.
        EncodeError: its arguments cannot be sent.
    """
    if call is None:
        return None
    if not isinstance(call, UtilityCall):
        raise TypeError(
            f"{name} must be a UtilityCall such as UtilityCall('remove_lora', (7,)), "
            f"not {shown(call)}"
        )
    check_method(call.method)
    plain(list(call.args), f"{name}.args")
    return call


def undo(
    dispatcher: Dispatcher, outcomes: Outcomes, call: UtilityCall, timeout: float | None
) -> Outcomes:
    """Send an undo call to the engines that may have run a call.

    Without a time limit, engines that have not answered the call are sent the undo and not waited
    for: they may be stopped for good.

    Returns:
        The outcome of each engine in ``outcomes.may_have_run``.
    """
    return (
        settle(
            dispatcher,
            call.method,
            call.args,
            engines=outcomes.may_have_run or None,
            timeout=timeout,
            each=True,
            unwaited=outcomes.unsettled if timeout is None else (),
        )
        if outcomes.may_have_run
        else Outcomes(call.method, {})
    )


def raise_undone(
    dispatcher: Dispatcher, error: UtilityCallError, call: UtilityCall, timeout: float | None
) -> None:
    """Undo what ``error`` reports, note how that went on it, and raise it.

    An interrupt of the undo goes through instead, with the error as its context, which has then
    what is known of the undo.
    """
    __tracebackhide__ = True
    assert error.outcomes is not None
    try:
        raise error
    except UtilityCallError:
        try:
            error.compensation = undo(dispatcher, error.outcomes, call, timeout)
        except (ClientClosedError, ClientBrokenError) as ended:
            error.compensation = ended.outcomes or Outcomes(
                call.method,
                {
                    index: Failed(NotSentError(f"not undone: {ended}", engine=index), 0.0)
                    for index in error.outcomes.may_have_run
                },
            )
            raise error from ended
        except BaseException as exc:
            error.compensation = getattr(exc, "outcomes", None)
            exc.add_note(
                f"interrupted while {call.method} undid {error.method} on "
                f"{engine_names(error.outcomes.may_have_run)}; the failure of {error.method} is "
                f"the context of this exception"
            )
            raise
        raise
