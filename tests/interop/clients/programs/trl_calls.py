"""TRL's VLLMClient, which trainers use where generation is on another server.

It refuses to start without the package vllm, of which these calls need nothing: an empty one stands in for it.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from checking import MESSAGES, expect, report, server_and_model

VLLM_VERSION = "0.31.0"
"""The newest that TRL 1.16 supports; it decides which requests TRL sends."""
PROMPTS = ["12 + 3 =", "2 + 2 ="]


def stand_in_for_vllm() -> None:
    """Modules whose names TRL imports to push weights, which is not checked here."""
    weights = "vllm.distributed.weight_transfer"
    names: dict[str, dict[str, object]] = {
        "vllm": {"__version__": VLLM_VERSION, "LLM": None, "RequestOutput": None, "SamplingParams": None},
        "vllm.sampling_params": {"StructuredOutputsParams": None},
        "vllm.utils": {},
        "vllm.utils.network_utils": {"get_ip": None},
        "vllm.distributed": {},
        weights: {},
        f"{weights}.nccl_common": {"trainer_init": None},
        f"{weights}.packed_tensor": {"packed_nccl_broadcast_producer": None},
    }
    for name, members in names.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        for member, value in members.items():
            setattr(module, member, value)
        sys.modules[name] = module


stand_in_for_vllm()
from trl.generation.vllm_client import VLLMClient  # noqa: E402  it looks for vllm when it is imported

URL, _ = server_and_model()
CLIENT = VLLMClient(base_url=URL, connection_timeout=30.0)


def in_shape(answer: dict[str, Any], *, num_prompts: int, n: int, num_logprobs: int) -> None:
    expect(len(answer["prompt_ids"]) == num_prompts and len(answer["completion_ids"]) == num_prompts * n, answer)
    for tokens, logprobs, ids in zip(
        answer["completion_ids"], answer["logprobs"], answer["logprob_token_ids"], strict=True
    ):
        expect(tokens and len(logprobs) == len(tokens) == len(ids), answer)
        for token, row, row_ids in zip(tokens, logprobs, ids, strict=True):
            expect(token in row_ids and row == sorted(row, reverse=True), answer)
            expect(num_logprobs <= len(row) <= num_logprobs + 1 and max(row) <= 0, answer)


def texts_are_generated_from() -> None:
    in_shape(CLIENT.generate(PROMPTS, n=4, max_tokens=8), num_prompts=2, n=4, num_logprobs=0)


def token_ids_are_generated_from() -> None:
    ids = CLIENT.generate(PROMPTS, max_tokens=1)["prompt_ids"]
    answer = CLIENT.generate(ids, n=2, max_tokens=8, temperature=0.7, top_p=0.9, top_k=20, min_p=0.01)
    in_shape(answer, num_prompts=2, n=2, num_logprobs=0)
    expect(answer["prompt_ids"] == ids, answer)


def the_likeliest_tokens_come_with_their_log_probs() -> None:
    in_shape(CLIENT.generate(PROMPTS, n=2, max_tokens=8, logprobs=3), num_prompts=2, n=2, num_logprobs=3)


def no_log_probs_are_given_where_none_are_asked_for() -> None:
    expect(CLIENT.generate(PROMPTS, max_tokens=4, logprobs=None)["logprobs"] is None)


def a_regular_expression_is_kept_to() -> None:
    first, second = CLIENT.generate(PROMPTS, max_tokens=4, structured_outputs_regex="7")["completion_ids"]
    expect(first == second, first)


def keywords_of_generation_are_honoured() -> None:
    keywords = {"seed": 5, "frequency_penalty": 0.5}
    twice = [CLIENT.generate(PROMPTS, max_tokens=8, generation_kwargs=keywords)["completion_ids"] for _ in range(2)]
    expect(twice[0] == twice[1], twice)


def chats_are_answered() -> None:
    answer = CLIENT.chat([MESSAGES, MESSAGES], n=2, max_tokens=8, logprobs=1)
    in_shape(answer, num_prompts=2, n=2, num_logprobs=1)


def given_sequences_are_scored() -> None:
    generated = CLIENT.generate(PROMPTS[:1], max_tokens=6, temperature=1.0)
    prompt, completion = generated["prompt_ids"][0], generated["completion_ids"][0]
    scored = CLIENT.get_sequence_logprobs([prompt + completion], [len(prompt)], top_logprobs=5)
    drawn = [row[0] for row in generated["logprobs"][0]]
    again = [row[0] for row in scored["actual_logprobs"][0]]
    # the token that was drawn may be outside of the five likeliest: TRL reads minus infinity there
    worst = max(abs(one - other) for one, other in zip(drawn, again, strict=True) if other > float("-inf"))
    expect(worst < 1e-3, worst)


def what_it_asks_besides_is_there() -> None:
    expect(CLIENT.get_world_size() == 1)
    CLIENT.reset_prefix_cache()


if __name__ == "__main__":
    report(
        "trl",
        [
            texts_are_generated_from,
            token_ids_are_generated_from,
            the_likeliest_tokens_come_with_their_log_probs,
            no_log_probs_are_given_where_none_are_asked_for,
            a_regular_expression_is_kept_to,
            keywords_of_generation_are_honoured,
            chats_are_answered,
            given_sequences_are_scored,
            what_it_asks_besides_is_there,
        ],
        "vllm: an empty stand-in (imported, nothing of it is called)",
    )
