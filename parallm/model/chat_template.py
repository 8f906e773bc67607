"""The model's chat template: what it can be given, and the text that it writes."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
from jinja2.meta import find_undeclared_variables

from parallm.conversation import PromptEnd
from parallm.errors import InvalidRequest

GENERATION_MARK = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""A tag of transformers alone, which marks the assistant's turns for training."""
GIVEN = {
    *("messages", "tools", "add_generation_prompt"),
    *("bos_token", "eos_token", "unk_token", "pad_token", "cls_token", "sep_token", "mask_token"),
    *("raise_exception", "strftime_now"),
}
"""Variables of templates that are never a client's to set by name."""


class ChatTemplate:
    """Pure Python: usable on any thread."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer  # the Hugging Face tokenizer

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that the template reads and a client may set, such as `enable_thinking`."""
        return self._reads(None) - GIVEN

    @cached_property
    def knows_tools(self) -> bool:
        return "tools" in self._reads([{}])

    def render(
        self,
        turns: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        variables: Mapping[str, object] | None = None,
        end: PromptEnd = "answer",
    ) -> str:
        """The text of a chat. Raises InvalidRequest where the template refuses it or knows no such thing."""
        self._check(turns, tools, variables or {})
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(turn) for turn in turns],
                    tools=[dict(tool) for tool in tools] or None,
                    add_generation_prompt=end == "answer",
                    continue_final_message=end == "unfinished",
                    tokenize=False,
                    **(variables or {}),
                )
            )
        except Exception as error:  # templates are user-supplied programs: whatever they raise is about the messages
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InvalidRequest(f"the model's chat template refuses these messages: {reason}", "messages") from error

    def _check(
        self,
        turns: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]],
        variables: Mapping[str, object],
    ) -> None:
        if tools and not self.knows_tools:
            raise InvalidRequest(
                "the model's chat template knows no tools; use another model or leave tools out", "tools"
            )
        if any(turn.get("tool_calls") for turn in turns) and "tool_calls" not in self._source([{}]):
            raise InvalidRequest("the model's chat template knows no tool_calls of earlier turns", "messages")
        unknown = sorted(variables.keys() - self.variables)
        if unknown:
            raise InvalidRequest(
                f"the model's chat template reads no variable {unknown[0][:100]!r} that a client may set; "
                f"it reads {sorted(self.variables) or 'none'}",
                "chat_template_kwargs",
            )

    def _source(self, tools: list[dict[str, object]] | None) -> str:
        return str(self._tokenizer.get_chat_template(tools=tools))

    def _reads(self, tools: list[dict[str, object]] | None) -> frozenset[str]:
        environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
        return frozenset(find_undeclared_variables(environment.parse(GENERATION_MARK.sub("", self._source(tools)))))
