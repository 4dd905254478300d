"""Calls from an event loop: each in a thread, by ``asyncio.to_thread``.

Run it with ``python examples/05_asyncio.py``.  Note what cancelling means: a task that is cancelled
stops waiting, but its call goes on in its thread until every engine has answered, or until its own
time limit.  So give the call a ``timeout``, and ``shield`` it if you want to know how it ends.
"""

from __future__ import annotations

import asyncio

from engine_client import EngineClient, UtilityTimeoutError, launch


async def heartbeat() -> None:
    """Show that the loop is never blocked."""
    while True:
        await asyncio.sleep(0.1)
        print(".", end="", flush=True)


async def use(client: EngineClient) -> None:
    echoes = (asyncio.to_thread(client.call_utility, "echo", n, timeout=30) for n in range(20))
    results = await asyncio.gather(*echoes)
    print(f"20 calls at once, {sum(map(len, results))} answers")

    # From now on, engine 1 keeps its answers to itself.
    hold = {"method": "echo", "do": "hold"}
    await asyncio.to_thread(client.call_utility, "mock_fault", hold, engines=[1])

    print("\nA time limit belongs to the call. Then you learn what each engine did:")
    try:
        await asyncio.to_thread(client.call_utility, "echo", "hello", timeout=0.5)
    except UtilityTimeoutError as error:
        print(f"\n{error}")

    print("\nA task that is cancelled only stops waiting. The call goes on, here shielded:")
    call = asyncio.create_task(asyncio.to_thread(client.call_utility, "echo", "late"))
    try:
        await asyncio.wait_for(asyncio.shield(call), timeout=0.5)
    except TimeoutError:
        print(f"\nnot waiting any more; {client.pending_utility_calls} engine is still to answer")
    await asyncio.to_thread(client.call_utility, "mock_release", engines=[1])
    print("and so it ended:", await call)


async def main() -> None:
    # launch() and close() block as well.
    client = await asyncio.to_thread(launch, 3)
    beats = asyncio.create_task(heartbeat())
    try:
        await use(client)
    finally:
        beats.cancel()
        # Before the loop ends: it waits for its threads, and so for a call without a time limit.
        await asyncio.to_thread(client.close)
    print(f"closed; waiters in the client: {client.pending_utility_calls}")


if __name__ == "__main__":
    asyncio.run(main())
