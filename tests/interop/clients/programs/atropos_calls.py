"""The two servers of Atropos that trainers use, VLLMServer and SGLangServer, with their health checks on."""

import asyncio
from collections.abc import Callable
from typing import Any

from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from checking import MESSAGES, MODEL, expect, report, server_and_model

URL, FOLDER = server_and_model()
Server = VLLMServer | SGLangServer
SECONDS_FOR_A_PROBE = 0.5
PROMPT = "12 + 3 ="


def with_server(kind: type[Any], call: Callable[[Any], Any]) -> Any:
    """What `call` answers with a server of Atropos that looks after our health meanwhile."""

    async def main() -> Any:
        config = APIServerConfig(base_url=f"{URL}/v1", api_key="none", model_name=MODEL, tokenizer_name=FOLDER)
        server = kind(config)
        answer = await call(server)
        await asyncio.sleep(SECONDS_FOR_A_PROBE)
        expect(server.check_task is not None and server.server_healthy, "its health check failed")
        server.check_task.cancel()
        return answer

    return asyncio.run(main())


def tokens_and_logprobs(kind: type[Any]) -> None:
    answer = with_server(
        kind,
        lambda server: server.tokens_and_logprobs_completion(
            prompt=PROMPT, n=12, max_tokens=8, temperature=1.0, top_p=1.0, stop=["<|user|>"]
        ),
    )
    prompt, tokens, logprobs, reasons = answer
    expect(prompt and len(tokens) == len(logprobs) == len(reasons) == 12, answer)
    for one, values in zip(tokens, logprobs, strict=True):
        expect(0 < len(one) == len(values) <= 8 and max(values) <= 0, answer)
    names = {reason if isinstance(reason, str) else reason["type"] for reason in reasons}
    expect(names <= {"stop", "length"}, names)


def one_completion(kind: type[Any]) -> None:
    call = lambda server: server.tokens_and_logprobs_completion(prompt=PROMPT, n=1, max_tokens=8)  # noqa: E731
    _, tokens, _, _ = with_server(kind, call)
    expect(len(tokens) == 1 and tokens[0], tokens)


def chat_and_completion(kind: type[Any]) -> None:
    chat = with_server(kind, lambda server: server.chat_completion(messages=MESSAGES, n=3, max_tokens=8))
    text = with_server(kind, lambda server: server.completion(prompt=PROMPT, n=3, max_tokens=8, split="eval"))
    expect(len(chat.choices) == len(text.choices) == 3, chat)


def vllm_gives_tokens_and_logprobs() -> None:
    tokens_and_logprobs(VLLMServer)


def vllm_gives_one_completion() -> None:
    one_completion(VLLMServer)


def vllm_chats_and_completes() -> None:
    chat_and_completion(VLLMServer)


def vllm_scores_a_prompt() -> None:
    answer = with_server(VLLMServer, lambda server: server.get_logprobs(prompt=PROMPT, top_k=3))
    tokens, ids, logprobs = (answer[f"prompt_{name}"] for name in ("tokens", "topk_token_ids", "topk_logprobs"))
    expect(len(tokens) == len(ids) == len(logprobs) and ids[0] == [], answer)
    for token, row, values in zip(tokens[1:], ids[1:], logprobs[1:], strict=True):
        expect(row[0] == token and 3 <= len(row) == len(values) <= 4 and max(values) <= 0, answer)


def sglang_gives_tokens_and_logprobs() -> None:
    tokens_and_logprobs(SGLangServer)


def sglang_gives_one_completion() -> None:
    one_completion(SGLangServer)


def sglang_chats_and_completes() -> None:
    chat_and_completion(SGLangServer)


if __name__ == "__main__":
    report(
        "atroposlib",
        [
            vllm_gives_tokens_and_logprobs,
            vllm_gives_one_completion,
            vllm_chats_and_completes,
            vllm_scores_a_prompt,
            sglang_gives_tokens_and_logprobs,
            sglang_gives_one_completion,
            sglang_chats_and_completes,
        ],
    )
