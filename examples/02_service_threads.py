"""A small synchronous service: worker threads share one client, each job has its own time limit.

Run it with ``python examples/02_service_threads.py``.  One of the three engines is slow now and
then; at the end the service is closed while a job still waits for an answer.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Timer

from engine_client import CallTimeout, ClientClosedError, EngineClient, launch

JOBS = 20
DEADLINE = 0.5
"""Seconds for one job, all engines together."""


def handle(client: EngineClient, job: int) -> tuple[int, list[int]]:
    """Do one job: ask every engine, and take what has come by the deadline.

    Returns:
        How many engines answered, and which were late.
    """
    outcomes = client.settle_utility("echo", f"job {job}", timeout=DEADLINE)
    late = [i for i, error in outcomes.failures.items() if isinstance(error, CallTimeout)]
    return len(outcomes.succeeded), late


def main() -> None:
    client = launch(3)
    with client, ThreadPoolExecutor(8, thread_name_prefix="worker") as workers:
        print(f"8 threads share {client}\n")

        # A reference engine is slow when asked to be: here engine 1, at its 5th and 12th job.
        for occurrence in (5, 12):
            fault = {"method": "echo", "do": "delay", "seconds": 2.0, "occurrence": occurrence}
            client.call_utility("mock_fault", fault, engines=[1])

        results = workers.map(lambda job: (job, *handle(client, job)), range(JOBS))
        for job, answers, late in results:
            note = f"  <- engine {late[0]} was late; nobody else waited for it" if late else ""
            print(f"job {job:2}: {answers} of 3 answers{note}")

        print("\nThe service is closed by another thread while a job waits without a time limit:")
        # From now on, engine 1 keeps its answers to itself.
        client.call_utility("mock_fault", {"method": "echo", "do": "hold"}, engines=[1])
        Timer(0.3, client.close).start()
        try:
            client.call_utility("echo", "the last job")
        except ClientClosedError as error:
            print(f"  {type(error).__name__}: {error}")
    print(f"Waiters left behind: {client.pending_utility_calls}")


if __name__ == "__main__":
    main()
