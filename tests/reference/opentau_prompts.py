"""Sequences of OpenTau's policies as text, written from the facts of its public source.

Images are written as `[images]`, states as `[states]`, FAST tokens as `[fast]`. Where a sample has no response, metadata or
subgoal, no sample of the batch is assumed to have one.
"""

from __future__ import annotations


def state_words(normalised: list[float], lowest: int = 0) -> str:
    """Return the bins of a normalised state: 256 equal ones over [-1, 1], with everything above in the last one.

    Everything below is in the first one. (With `lowest` -1 it has that number, as in openpi, whose bins our pi05 keeps.)
    """
    return " ".join(str(min(int((value + 1) * 128), 255)) if value >= -1 else str(lowest) for value in normalised)


def pi05(task: str, state: str, response: str) -> str:
    """With responses: a response begins with the token `<bos>`, which is left out here."""
    return f"[images]Task: {task}, State: {state};\nResponse: {response}<eos>;\nAction: [fast]"


def pi05_mem(task: str) -> str:
    return f"[images]Task: {task}<eos>Actions:[states][fast]"


def pi06(task: str, state: str, response: str) -> str:
    """With responses: a response begins with the token `<bos>`, which is left out here."""
    return f"[images]Task: {task}<eos>State: {state}<eos>Response:{response}<eos>Actions:[fast]"


def value(task: str, state: str, response: str) -> str:
    return f"[images]Task: {task}<eos>State: {state}<eos>[value]{response}"


def pi07_low_level(task: str, response: str, metadata: list[str], *, subgoal: bool) -> str:
    has_context = bool(response or metadata or subgoal)
    return (
        f"[images]Task: {task}, State: [states]"
        + (", " if has_context else ":\n")
        + (f"Subtask: {response}, " if response else "")
        + (f"Metadata: {''.join(metadata)}" if metadata else "")
        + (";\n " if has_context else "")
        + ("Subgoal: [subgoal], " if subgoal else "")
        + "Action: [fast]"
    )


def pi07_paligemma(task: str, response: str, metadata: list[str], *, subgoal: bool) -> str:
    return (
        f"[images]Task: {task}, State: [states]"
        + (f", Subtask: {response}" if response else "")
        + (f", Metadata: {''.join(metadata)}" if metadata else "")
        + (", Subgoal: [subgoal]" if subgoal else "")
        + ":\nAction: [fast]"
    )


def pi07_high_level(task: str, past_memory: str, state: str, metadata: list[str], memory: str, response: str) -> str:
    return (
        f"[images]Task: {task}, Past Memory: {past_memory}, State: {state}, "
        + (f"Metadata: {''.join(metadata)};\n " if metadata else "")
        + f"Updated Memory: {memory}<eos>Subtask: {response}<eos>"
    )
