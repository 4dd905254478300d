"""Four engines, one call to all of them, and what you learn when one of them fails.

Run it with ``python examples/01_quickstart.py``.  The engines are reference engines: small
processes that speak the protocol of real ones and simulate a model.
"""

from __future__ import annotations

from engine_client import UtilityCallError, launch


def main() -> None:
    with launch(4) as client:
        print("Four engines, each a process of its own:")
        for engine in client.call_utility("whoami"):
            print(f"  engine {engine['index']}: process {engine['pid']}")

        print("\nOne call goes to all of them and returns when all have answered:")
        print("  echo('hello')  ->", client.call_utility("echo", "hello"))
        print("  is_sleeping()  ->", client.is_sleeping(), " (they agree)")

        print("\nNow engine 2 runs out of memory. The call still waits for everybody, then raises:")
        fault = {"method": "echo", "do": "fail", "message": "out of memory"}
        client.call_utility("mock_fault", fault, engines=[2])
        try:
            client.call_utility("echo", "hello again")
        except UtilityCallError as error:
            print(f"\n{type(error).__name__}: {error}\n")
            print("The error has every engine's outcome:\n")
            print(error.outcomes)
            print("\nTo undo the call, undo it on engines", error.outcomes.may_have_run)

        print(
            "\nNobody else was harmed:", client.call_utility("echo", "still here", engines=[0, 3])
        )
        print(client)
    print("Closed, and the four processes are gone.")


if __name__ == "__main__":
    main()
