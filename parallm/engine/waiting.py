"""The order in which prompts wait: the lowest priority number first, and first come, first served among equals."""

from collections import deque

from parallm.engine.sequence import Prompt


def insert(prompts: deque[Prompt], prompt: Prompt) -> None:
    """Put `prompt` behind those of its own and of lower priority numbers; what was begun keeps its place."""
    place = len(prompts)
    while place and _goes_before(prompt, prompts[place - 1]):
        place -= 1
    prompts.insert(place, prompt)


def _goes_before(prompt: Prompt, other: Prompt) -> bool:
    return prompt.request.priority < other.request.priority and other.num_computed == 0
