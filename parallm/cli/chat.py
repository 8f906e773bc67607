"""`parallm run`: one answer, or a conversation at the terminal."""

import json
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from parallm.cli.connection import CommandFailed, command, post
from parallm.cli.start import served_name, server_for
from parallm.client.calls import ApiError
from parallm.client.client import Client

HELP = """\
  /set system TEXT            message before the conversation; without TEXT none
  /set parameter NAME VALUE   a field of a request, such as temperature 0.5, max_tokens 100, seed 1
  /set format json            answer in JSON; /set noformat ends it
  /set think [LEVEL]          reason first; /set nothink does not
  /set verbose                show counts and durations; /set quiet does not
  /show                       what is set, and the model
  /save FILE                  write the conversation as lines of JSON
  /clear                      forget the conversation
  /bye                        leave, as Ctrl-D does; Ctrl-C ends an answer
  \"\"\"                         begins and ends a message of several lines
"""
LEVELS = ("low", "medium", "high")
QUOTES = '"""'
NUMBERS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "repetition_penalty")


@dataclass(slots=True, kw_only=True)
class Conversation:
    """Messages so far, and the fields of the next request."""

    model: str
    messages: list[dict[str, str]] = field(default_factory=list)
    system: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    hides_thinking: bool = False
    is_verbose: bool = False

    def ask(self, client: Client, text: str, out: TextIO) -> None:
        """Send a message and print the answer as it comes. Raises ApiError; the message is then not kept."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        asked = [*self.messages, {"role": "user", "content": text}]
        body = {
            "model": self.model,
            "messages": [*system, *asked],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }
        answer = Answer(hides_thinking=self.hides_thinking)
        with _stops_on_interrupt() as stopped:
            for event in client.events(post("/v1/chat/completions", body)):
                out.write(answer.read(event))
                out.flush()
                if stopped():
                    break
        out.write("" if answer.text.endswith("\n") else "\n")
        if self.is_verbose:
            sys.stderr.write(answer.summary())
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]


@dataclass(slots=True)
class Answer:
    """An answer as its events come in."""

    hides_thinking: bool
    text: str = ""
    began: float = field(default_factory=time.perf_counter)
    _first: float | None = None
    _is_thinking: bool = False
    _usage: dict[str, Any] = field(default_factory=dict)

    def read(self, event: dict[str, Any]) -> str:
        """Return what the event adds to the screen."""
        self._usage = event.get("usage") or self._usage
        shown = ""
        for choice in event.get("choices", ()):
            delta = choice["delta"]
            thought, text = delta.get("reasoning_content") or "", delta.get("content") or ""
            if (thought or text) and self._first is None:
                self._first = time.perf_counter()
            if thought and not self.hides_thinking:
                shown += ("" if self._is_thinking else "Thinking...\n") + thought
                self._is_thinking = True
            if text and self._is_thinking:
                shown += "\n...done thinking.\n\n"
                self._is_thinking = False
            self.text += text
            shown += text
        return shown

    def summary(self) -> str:
        now = time.perf_counter()
        first = now if self._first is None else self._first
        count, prompt = self._usage.get("completion_tokens", 0), self._usage.get("prompt_tokens", 0)
        rate = f", {(count - 1) / (now - first):.1f} tokens/s" if count > 1 and now > first else ""
        return f"{prompt} + {count} tokens, first after {first - self.began:.2f} s, {now - self.began:.2f} s{rate}\n"


@command
def run(arguments: Namespace) -> int:
    """Answer the prompt, with what is piped in behind it; or converse until the end of the input."""
    conversation = Conversation(
        model=arguments.model,
        system=arguments.system,
        hides_thinking=arguments.hidethinking,
        is_verbose=arguments.verbose,
        fields=_fields(arguments),
    )
    prompt = " ".join(arguments.words)
    if not sys.stdin.isatty():
        prompt = "\n\n".join(filter(None, (prompt, sys.stdin.read().strip())))
        if not prompt:
            raise CommandFailed("nothing to answer: the prompt and standard input are empty")
    with server_for(arguments) as client:
        conversation.model = served_name(client, arguments.model)
        if arguments.keepalive is not None:
            load = {"model": conversation.model, "keep_alive": arguments.keepalive}
            client.send(post("/v1/models/load", load))
        if prompt:
            conversation.ask(client, prompt, sys.stdout)
        else:
            _converse(client, conversation)
    return 0


def _fields(arguments: Namespace) -> dict[str, Any]:
    given = {name: getattr(arguments, name) for name in ("max_tokens", "temperature", "seed")}
    fields = {name: value for name, value in given.items() if value is not None}
    if arguments.format is not None:
        fields["response_format"] = _response_format(arguments.format)
    return fields | ({} if arguments.think is None else _thinking(arguments.think))


def _response_format(given: str) -> dict[str, Any]:
    if given == "json":
        return {"type": "json_object"}
    try:
        schema = json.loads(Path(given).read_text())
    except (OSError, ValueError) as error:
        raise CommandFailed(f"--format {given}: neither json nor a file with a JSON schema: {error}") from error
    return {"type": "json_schema", "json_schema": {"name": Path(given).stem, "schema": schema}}


def _thinking(level: str) -> dict[str, Any]:
    """Return the field that asks for reasoning. A server refuses it where the model's template knows no such thing."""
    if level in LEVELS:
        return {"reasoning_effort": level}
    if level in ("true", "false"):
        return {"chat_template_kwargs": {"enable_thinking": level == "true"}}
    raise CommandFailed(f"think {level}: neither true nor false nor one of {', '.join(LEVELS)}")


def _converse(client: Client, conversation: Conversation) -> None:
    with suppress(ImportError):
        import readline  # noqa: F401, PLC0415  # it gives input() history and editing; not everywhere there is one
    sys.stdout.write(f"{conversation.model}; /? shows the commands, /bye leaves\n")
    while (text := _read_message()) is not None:
        if text == "/bye":
            return
        try:
            if text.startswith("/"):
                _obey(conversation, text[1:].split(maxsplit=1))
            elif text:
                conversation.ask(client, text, sys.stdout)
        except (CommandFailed, ApiError, OSError) as error:
            sys.stderr.write(f"{error}\n")


def _read_message() -> str | None:
    """Return a message without the quotes around several lines; None at the end of the input."""
    try:
        text = input(">>> ").strip()
        if not text.startswith(QUOTES):
            return text
        text = text.removeprefix(QUOTES)
        while not text.endswith(QUOTES):
            text += "\n" + input("... ")
        return text.removesuffix(QUOTES).strip()
    except EOFError:
        sys.stdout.write("\n")
        return None


def _obey(conversation: Conversation, words: list[str]) -> None:
    """Do what a line that begins with `/` says."""
    match words:
        case ["clear"]:
            conversation.messages.clear()
        case ["save", path]:
            lines = [json.dumps(message) for message in conversation.messages]
            Path(path).expanduser().write_text("".join(f"{line}\n" for line in lines))
        case ["show"]:
            shown = {"model": conversation.model, "system": conversation.system, **conversation.fields}
            sys.stdout.write("".join(f"{name}  {value}\n" for name, value in shown.items() if value is not None))
        case ["set", rest]:
            _set(conversation, rest.split(maxsplit=1))
        case ["?" | "help"]:
            sys.stdout.write(HELP)
        case _:
            raise CommandFailed(f"/{' '.join(words)}: unknown; /? shows the commands")


def _set(conversation: Conversation, words: list[str]) -> None:
    fields = conversation.fields
    match words:
        case ["system", *rest]:
            conversation.system = " ".join(rest) or None
        case ["parameter", rest]:
            name, _, value = rest.partition(" ")
            fields[name] = _number(name, value)
        case ["format", given]:
            fields["response_format"] = _response_format(given)
        case ["noformat"]:
            fields.pop("response_format", None)
        case ["think" | "nothink" as word, *level]:
            for name in ("reasoning_effort", "chat_template_kwargs"):
                fields.pop(name, None)
            fields |= _thinking("false" if word == "nothink" else level[0] if level else "true")
        case ["verbose" | "quiet" as word]:
            conversation.is_verbose = word == "verbose"
        case _:
            raise CommandFailed(f"/set {' '.join(words)}: unknown; /? shows the commands")


def _number(name: str, value: str) -> float | int:
    if name not in NUMBERS:
        raise CommandFailed(f"{name}: no parameter; there are {', '.join(NUMBERS)}")
    try:
        return json.loads(value) if isinstance(json.loads(value), int | float) else float(value)
    except ValueError as error:
        raise CommandFailed(f"{name} {value}: no number") from error


@contextmanager
def _stops_on_interrupt() -> Iterator[Any]:
    """Note the first Ctrl-C instead of ending; the second ends the program."""
    received = False

    def note(_: int, __: object) -> None:
        nonlocal received
        if received:
            raise KeyboardInterrupt
        received = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: received
    finally:
        signal.signal(signal.SIGINT, before)
