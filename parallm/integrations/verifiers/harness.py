"""The harness that plays a task of verifiers without a process of its own: one question per segment.

Its calls of the model go through the package's interception server, so stops, limits, rewrites and traces hold.
"""

import aiohttp

import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["OneQuestion"]


class OneQuestionConfig(vf.HarnessConfig):
    pass


class OneQuestion(vf.Harness[OneQuestionConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Ask once. A refusal, as by a stop or a limit, becomes an exit code that the package understands."""
        body = {"model": ctx.model, "messages": [message_to_wire(message) for message in opening(self, data)]}
        headers = {"Authorization": f"Bearer {secret}"}
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
            session.post(f"{endpoint}/chat/completions", json=body, headers=headers) as response,
        ):
            text = await response.text()
        return vf.ProgramResult(exit_code=int(response.status != 200), stdout="", stderr=text)


def opening(harness: vf.Harness[OneQuestionConfig], data: vf.TaskData) -> vf.Messages:
    """Return the conversation that a segment begins with."""
    system, prompt = harness.resolve_prompt(data)
    messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or [])
    return [*([vf.SystemMessage(content=system)] if system else []), *messages]
