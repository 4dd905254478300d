"""Threads and sockets: one dispatcher thread per client, and what callers share with it.

The path of a call::

    caller:      PendingCall -> Registry.add -> Outbox.append -> blocks on the call's latch
    dispatcher:  Outbox.take -> Core.submit -> ROUTER ... PULL -> Core.output -> Registry.settle
    caller:      latch released -> abandoned.append (finally) -> drain -> reads its own futures

Two locks, never held together: the registry's (waiters and what callers see of the engines) and
the outbox's (open flag, queue, wake-up).  Neither is held while sending, logging or running code
of a user.
"""
