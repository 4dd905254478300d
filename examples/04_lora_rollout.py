"""Roll a LoRA adapter out to every engine, or to none.

Run it with ``python examples/04_lora_rollout.py``.  Engine 2 was started for adapters of a small
rank, and refuses one that the other engines load.
"""

from __future__ import annotations

from engine_client import EngineClient, LoraRequest, UtilityCallError, launch


def roll_out(client: EngineClient, lora: LoraRequest) -> bool:
    """Load an adapter on every engine; if one cannot, unload it where it may be loaded."""
    try:
        client.add_lora(lora, compensate=True, timeout=60)
    except UtilityCallError as error:
        print(f"{lora.lora_name} was not rolled out:\n\n{error}\n")
        undone = error.compensation
        if undone is not None and not undone.all_ok:
            # A rollback may fail too; its outcomes say where somebody has to look.
            print(f"and the rollback is not complete:\n\n{undone}\n")
        return False
    print(f"{lora.lora_name} is on all engines")
    return True


def show(client: EngineClient) -> None:
    """Print which adapters each engine holds."""
    for engine in client.engines:
        held = client.list_loras(engines=[engine.index])
        print(f"  engine {engine.index} holds {sorted(held) or 'none'}")


def main() -> None:
    with launch(4) as client:
        roll_out(client, LoraRequest("polite", 1, "/adapters/polite"))
        show(client)

        # A reference engine refuses what it is told to, in the words of a real one.
        text = "LoRA rank 64 is greater than max_lora_rank 16."
        refuse = {"method": "add_lora", "do": "fail", "message": text, "occurrence": 1}
        client.call_utility("mock_fault", refuse, engines=[2])

        print("\nThe next one has rank 64:")
        brief = LoraRequest("brief", 2, "/adapters/brief")
        roll_out(client, brief)
        show(client)

        print("\nEngine 2 now takes such a rank, and the rollout is tried again:")
        roll_out(client, brief)
        show(client)
        print(f"All engines agree: {sorted(client.list_loras())}")


if __name__ == "__main__":
    main()
