"""Settings of vectors and scores of texts, and of policy nets."""

from typing import Annotated, Literal

from pydantic import Field

from parallm.settings import settings
from parallm.types import Pooling

PolicyNetName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.:-]{0,127}$")]


@settings
class TaskSettings:
    pooling: Pooling | None = None
    """How the hidden states of a text become its vector at `/v1/embeddings`; null: as `modules.json` in the model's
    folder says, and without that file there are no vectors. An adapter may say otherwise."""
    end_token: Literal["append", "none"] | None = None
    """Whether texts get the model's end token before they are pooled; null: as the model's tokenizer does it, which
    has to end texts by a token if `last` is pooled."""
    matryoshka: bool = False
    """The model was trained for vectors that are cut short: any `dimensions` is accepted."""
    score_template: str | None = None
    """The text of a query and a document that the model scores: `qwen3_reranker` or another family of
    `tasks/templates.py`, or a text with {query} and {document}, perhaps {instruction}; null: as the tokenizer joins two
    texts."""
    score_tokens: tuple[str, ...] = ()
    """The words whose logits after that text are the score, the first one's minus the second one's, such as [yes, no];
    empty: those of the family, or the head in the model's folder."""
    policies: dict[PolicyNetName, str] = Field(default_factory=dict)
    """Policy nets of `/v1/rl/act` to serve from the start, by name: a folder with config.json and model.safetensors,
    perhaps signature.json."""
