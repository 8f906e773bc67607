"""Settings of the HTTP server."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from parallm.settings import settings

AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.:-]{0,127}$")]
OFF, AUTO = "off", "auto"
"""Values of `server.state` beside folders."""
KeyRole = Literal["inference", "training", "admin"]
"""Rights of a key; each role includes those before it. `operation/auth.py` has the role of each route."""


def _refuse_number(value: object) -> object:
    """Names such as `inf` and `12` reach us as numbers, unless they stand in quotes."""
    if isinstance(value, bool | int | float):
        raise ValueError("should stand in quotes, since it reads as a number")
    return value


@settings
class ApiKey:
    """One key. Exactly one of `env`, `file` and `sha256` says where it is: no key stands in a printed config."""

    name: Annotated[str, BeforeValidator(_refuse_number)] = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of the key in the log; clients never see it."""
    role: KeyRole
    """Rights of the key: `inference` asks for completions, `training` also trains, `admin` also loads adapters."""
    env: str | None = None
    """Environment variable with the key."""
    file: str | None = None
    """File with the key; white space around it does not count."""
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-fA-F]{64}$")
    """Digest of the key, as `printf %s KEY | sha256sum` prints it."""


def _check_host(name: str) -> str:
    if not re.fullmatch(r"\*|[A-Za-z0-9._-]+", name):
        raise ValueError("should be a name without scheme and port, such as llm.example.org, or *")
    return name


@settings
class SamplingDefaults:
    """Sampling parameters of requests that do not set them; null: the API's default."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    """Sampling temperature, 0 for greedy; null: 1."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Probability mass of the likeliest tokens to sample from; null: 1, off."""
    top_k: int | None = Field(default=None, ge=-1)
    """Number of likeliest tokens to sample from; null: 0, off."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Minimum probability of a sampled token, as a share of the likeliest token's; null: 0, off."""
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    """Divisor of the logits of tokens in the prompt or the text so far; null: 1, off."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Limit of a completion, in place of `server.default_max_tokens`; null: that."""


@settings
class ServerSettings:
    enabled: bool = True
    """Answer HTTP at all."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every address of this machine and needs keys."""
    port: int | None = Field(default=8000, ge=0, le=65535)
    """0 picks a free port and prints it; null listens on `uds` alone."""
    uds: str | None = None
    """Path of a unix socket to listen on beside host and port; `auto` is the one where `parallm` looks for a server."""
    uds_mode: Literal[600, 660, 666] = 600
    """Mode of the unix socket, as chmod takes it; one that lets others than its owner connect needs keys."""
    dashboard: bool = True
    """Serve the page that shows runs at `/dashboard/`."""
    ollama: bool = False
    """Answer Ollama's routes below `/api`, too; programs that expect Ollama's port want `server.port=11434`."""
    max_blob_bytes: int = Field(default=64 * 2**30, ge=1024)
    """Size of a file that is uploaded to `/api/blobs` to create a model of."""
    ssl_certfile: str | None = None
    """Certificate chain in PEM: HTTPS instead of HTTP."""
    ssl_keyfile: str | None = None
    """Key of the certificate, without a password, if it is not in the same file."""
    ssl_ca_certs: str | None = None
    """Certificates, one of which must have signed that of each client."""
    api_keys: tuple[ApiKey, ...] = ()
    """Keys of clients; without any, every route is open, and the server listens on this machine only unless
    `control_routes` is false."""
    control_routes: bool = True
    """False refuses every route of the roles training and admin."""
    allowed_hosts: tuple[Annotated[str, AfterValidator(_check_host)], ...] = ()
    """Names such as `llm.example.org` by which proxies and other machines call this server; `*` is every name.

    Addresses, `localhost`, `host` and the name of this machine are always its own. Where there are keys and `host` is
    an address that other machines reach, every name is, as long as none is given here.
    """
    cors_origins: tuple[str, ...] = ()
    """Origins such as `https://example.org` whose pages may read answers in a browser; `*` is every one."""
    drain_seconds: float = Field(default=20.0, ge=0)
    """Seconds that answers may go on after the signal to end; new requests get 503 meanwhile."""
    max_connections: int | None = Field(default=None, ge=1)
    """Open at once. Beyond it those whose clients stand still are closed; null: 1,000, or half of the open files."""
    request_seconds: float | None = Field(default=None, gt=0)
    """Seconds after which an answer must be complete; null: no limit but what a client asks for with
    `x-request-timeout`."""
    stall_seconds: float = Field(default=60.0, gt=0)
    """Seconds after which a stream is given up whose client takes nothing."""
    coalesce_ms: float = Field(default=50.0, ge=0, le=1000)
    """Milliseconds between two events of a stream while more than 16 are open; 0: each token at once."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one prompt; null: what the context allows."""
    request_log: str | None = None
    """File to which each request and each failure appends a line of JSON, or `stderr`; null: none."""
    otlp_endpoint: str | None = None
    """Address for OpenTelemetry spans, such as `http://localhost:4318/v1/traces`; needs `parallm[otel]`. null: none."""
    max_n: int = Field(default=64, ge=1)
    """Maximum `n` of a request, the completions of one prompt."""
    max_completions: int = Field(default=256, ge=1)
    """Prompts times `n` of one HTTP request."""
    max_top_logprobs: int = Field(default=20, ge=0)
    """Maximum number of alternatives per token in log-probs."""
    max_stop: int = Field(default=16, ge=1)
    """Maximum number of stop strings of a request."""
    generation_config: str = "parallm"
    """Source of sampling defaults for `/v1/completions`, `/v1/chat/completions` and `/v1/responses`: `parallm` (as in
    OpenAI's API), `auto` (the model's generation_config.json), or a folder with that file. Rollouts and requests with
    `collect_trajectory` use none."""
    override_generation_config: SamplingDefaults = SamplingDefaults()
    """Sampling defaults that win over those of `server.generation_config`."""
    default_max_tokens: int = Field(default=512, ge=1)
    """`max_tokens` of requests that name none; less where the context ends before."""
    parse_special: bool = True
    """Make tokens of the texts of control tokens in raw prompts; in the contents of chats they stay text."""
    max_body_bytes: int = Field(default=4 * 1024 * 1024, ge=1024)
    """Larger request bodies are refused before they are read as JSON."""
    max_answer_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    """Bytes of all tensors in an answer of `/v1/predict`, `/v1/rl/act` and `/v2`."""
    max_grammar_bytes: int = Field(default=64 * 1024, ge=1)
    """Bytes of a schema, a regular expression, choices, or the schemas of all tools that a model is made to call."""
    max_grammar_seconds: float = Field(default=10.0, gt=0)
    """Seconds to prepare a grammar. It is done beside the event loop, so other requests go on."""
    reward_model: str | None = None
    """Reward model of `POST /v1/rewards/score`, under the name `reward`: a run (its best version), RUN@VERSION, a
    checkpoint or an adapter; null: the reward models of rollouts alone."""
    adapters_root: str | None = None
    """The only folder that clients may load adapters from by path; null: none."""
    max_adapter_bytes: int = Field(default=512 * 1024 * 1024, ge=1024)
    """Weights of an adapter that is loaded or uploaded; larger uploads are cut off."""
    adapters: dict[AdapterName, str] = Field(default_factory=dict)
    """Adapters to serve from the start, by name: a folder of an adapter, a checkpoint or a run, of which the best
    version counts, or RUN@VERSION."""
    state: str = "auto"
    """Place to keep what clients with the role admin set (adapters, aliases, splits, what names mean),
    and policy nets:
    `auto` in the run folder while training, else in checkpoints/NAME; a folder; or `off`."""
    max_adapters: int = Field(default=64, ge=1)
    """Names of adapters in memory that clients may fill."""
