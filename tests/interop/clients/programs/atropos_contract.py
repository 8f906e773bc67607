"""What environments do with a server through atroposlib's own classes; prints the sequences that they would post.

Called with the server's URL and the model's folder, and with `bos` where its tokenizer begins texts with a token of its
own. Every sequence is checked here; what the learner makes of it is for others to see.
"""

import asyncio
import json
import math
import sys
from typing import Any

from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from checking import MESSAGES, expect, server_and_model
from transformers import AutoTokenizer

URL, FOLDER = server_and_model()
NUMBERS = (1, 4, 12)
MAX_TOKENS = 24


def manager(kind: str) -> ServerManager:
    config = APIServerConfig(
        server_type=kind, base_url=f"{URL}/v1", api_key="none", model_name="policy", tokenizer_name=FOLDER
    )
    return ServerManager([config])


def check_node(node: Any, num_prompts: int) -> dict[str, Any]:
    """A sequence as it would be posted; raises AssertionError for one that cannot be right."""
    expect(len(node.tokens) == len(node.masked_tokens) == len(node.logprobs), "lengths differ")
    trained = [mask != -100 for mask in node.masked_tokens]
    for token, mask, logprob, is_trained in zip(node.tokens, node.masked_tokens, node.logprobs, trained, strict=True):
        expect(mask == token if is_trained else logprob == 1.0, (token, mask, logprob))
        expect(not is_trained or (math.isfinite(logprob) and logprob <= 0), logprob)
    starts = sum(now and not before for before, now in zip([False, *trained], trained, strict=False))
    expect(starts == num_prompts and not trained[0], f"{starts} trained spans, not {num_prompts}")
    return {"tokens": node.tokens, "masks": node.masked_tokens, "logprobs": node.logprobs}


async def sampled(kind: str, tokenizer: Any, n: int, **fields: Any) -> list[dict[str, Any]]:
    server = manager(kind)
    async with server.managed_server(tokenizer=tokenizer) as managed:
        answer = await managed.chat_completion(messages=MESSAGES, n=n, max_tokens=MAX_TOKENS, temperature=1.0, **fields)
        nodes = managed.get_state()["nodes"]
    expect(len(answer.choices) == len(nodes) == n, f"{len(nodes)} of {n}")
    expect({choice.finish_reason for choice in answer.choices} <= {"stop", "length"}, answer)
    end_probes(server)
    return [check_node(node, 1) for node in nodes]


async def cut_off(kind: str, tokenizer: Any) -> None:
    """Three tokens are three tokens, and that is told."""
    server = manager(kind)
    async with server.managed_server(tokenizer=tokenizer) as managed:
        answer = await managed.chat_completion(messages=MESSAGES, n=4, max_tokens=3, temperature=1.0)
        nodes = managed.get_state()["nodes"]
    for choice, node in zip(answer.choices, nodes, strict=True):
        num_tokens = sum(mask != -100 for mask in node.masked_tokens)
        expect(num_tokens == 3 if choice.finish_reason == "length" else num_tokens < 4, (choice, num_tokens))
    end_probes(server)


async def two_turns(kind: str, tokenizer: Any) -> dict[str, Any]:
    """The second turn goes on from the tokens of the first, which stay trained."""
    server, messages = manager(kind), list(MESSAGES)
    async with server.managed_server(tokenizer=tokenizer) as managed:
        for reply in ("And if one is lost?", None):
            answer = await managed.chat_completion(messages=messages, n=1, max_tokens=MAX_TOKENS, temperature=1.0)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            if reply is not None:
                messages.append({"role": "user", "content": reply})
        (node,) = managed.get_state()["nodes"]
    end_probes(server)
    return check_node(node, 2)


async def openai_is_refused(tokenizer: Any) -> None:
    """By atroposlib itself: such an answer has no token ids."""
    server = manager("openai")
    try:
        async with server.managed_server(tokenizer=tokenizer):
            pass
    except NotImplementedError:
        answer = await server.chat_completion(messages=MESSAGES, n=3, max_tokens=4)
        expect(len(answer.choices) == 3, answer)
        end_probes(server)
        return
    raise AssertionError("openai's managed_server did not refuse")


def end_probes(server: ServerManager) -> None:
    for one in server.servers:
        if one.check_task is not None:
            one.check_task.cancel()


async def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    if "bos" in sys.argv[3:]:
        begun = tokenizer.encode("one", add_special_tokens=True)
        expect(begun[0] == tokenizer.bos_token_id, f"this tokenizer begins with {begun[:2]}")
    found: dict[str, Any] = {}
    for kind in ("vllm", "sglang"):
        for n in NUMBERS:
            found[f"{kind} n={n}"] = await sampled(kind, tokenizer, n)
        found[f"{kind} stop"] = await sampled(kind, tokenizer, 4, stop=["+", "."])
        await cut_off(kind, tokenizer)
        found[f"{kind} two turns"] = [await two_turns(kind, tokenizer)]
    await openai_is_refused(tokenizer)
    print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
