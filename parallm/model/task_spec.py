"""Files of sentence-transformers and config.json <-> `TaskSpec`: pooling, normalization, prompts, sizes, labels.

What is not understood is refused by name, never guessed: a wrong pooling gives vectors that look right and are not.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from parallm.errors import ModelError
from parallm.types import Activation, Pooling, Task, TaskSpec

MODULES = "modules.json"
SENTENCES = "config_sentence_transformers.json"
MAX_BYTES = 1024 * 1024
POOLING_KEYS: Mapping[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
"""Switches of 1_Pooling/config.json in the order in which sentence-transformers joins their vectors."""
NAMES: Mapping[str, Pooling] = {"lasttoken": "last", "weightedmean": "weighted_mean"}
"""Names in the newer `pooling_mode` that differ from ours."""
CLASSIFIER = "ForSequenceClassification"
ENCODERS = frozenset({"bert", "modernbert", "roberta", "xlm-roberta"})
"""Model types of `model/encoders`: their tokens see all others."""
QWEN3_QUERY = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
"""Prompt of Qwen3-Embedding, which was trained for vectors of any size and does not say so (arXiv 2506.05176)."""


def read_task_spec(folder: Path) -> TaskSpec | None:
    """The spec of a folder with modules.json, or with a head for sequence classification; None of others.

    Raises ModelError for what is not understood.
    """
    is_classifier = (folder / "config.json").is_file() and _is_classifier(_object(folder / "config.json"))
    if not (folder / MODULES).is_file():
        return _classifier_spec(folder) if is_classifier else None
    modules = _read(folder / MODULES)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{MODULES} should be a list of modules")
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if kinds == ["Transformer"] and is_classifier:
        return _classifier_spec(folder)
    if kinds == ["Transformer", "LogitScore"]:
        return _answer_spec(_module(folder, modules[1]), _optional(folder / SENTENCES))
    if re.fullmatch(r"Transformer Pooling( Dense)*( Normalize)?", " ".join(kinds)) is None:
        raise ModelError(
            f"{MODULES} chains {' -> '.join(kinds)[:200]}, and only Transformer -> Pooling (-> Dense) "
            "(-> Normalize) and Transformer -> LogitScore are known here"
        )
    spec = _embed_spec(folder, _module(folder, modules[1]), normalizes=kinds[-1] == "Normalize")
    layers = [module for module, kind in zip(modules, kinds, strict=True) if kind == "Dense"]
    for module in layers:
        _module(folder, module)  # which has to be there
    return dataclasses.replace(spec, dense=tuple(str(module["path"]) for module in layers))


def _embed_spec(folder: Path, pooling: Mapping[str, Any], *, normalizes: bool) -> TaskSpec:
    """The spec of a folder that makes vectors; `pooling` is the config of its Pooling. Raises ModelError."""
    config = _optional(folder / SENTENCES)
    prompts = {str(name): str(text) for name, text in (config.get("prompts") or {}).items()}
    default = config.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ModelError(f"{SENTENCES} has no prompt {str(default)[:100]!r}, its default_prompt_name")
    limits = _optional(folder / "sentence_bert_config.json")
    if limits.get("do_lower_case"):
        raise ModelError("sentence_bert_config.json: do_lower_case changes texts, which is not known here")
    if "message" in (limits.get("modality_config") or {}):
        raise ModelError(
            "sentence_bert_config.json: modality_config makes each text a message of the chat template, which is not "
            "known here; if the model was trained on plain texts, take `message` out of it"
        )
    if pooling.get("include_prompt") is False and any(prompts.values()):
        raise ModelError(f"{MODULES}: include_prompt=false leaves prompts out of the pooling, which is not known here")
    return TaskSpec(
        pooling=_pooling(pooling),
        normalizes=normalizes,
        dimensions=() if prompts.get("query") == QWEN3_QUERY else _dimensions(folder),
        prompts=prompts,
        default_prompt=default,
        max_tokens=limits.get("max_seq_length"),
        source=MODULES,
    )


def head_spec(num_labels: int, config: Mapping[str, Any] = MappingProxyType({})) -> TaskSpec:
    """The spec of a head with this number of rows, by the config.json of transformers. Raises ModelError.

    One number is a score, several are those of labels. Where no activation is named, a score gets a sigmoid as in
    sentence-transformers, and several numbers get what the pipeline of transformers gives them.
    """
    named = config.get("id2label") or {}
    labels = tuple(str(named.get(str(index), f"LABEL_{index}")) for index in range(num_labels))
    usual: Activation = "softmax"
    if num_labels == 1 or config.get("problem_type") == "multi_label_classification":
        usual = "sigmoid"
    elif config.get("problem_type") == "regression":
        usual = "none"
    kind = config.get("model_type")
    pooling: Pooling = "last" if kind not in ENCODERS else "cls"
    if kind == "modernbert":
        (pooling,) = _check_pooling([str(config.get("classifier_pooling", "cls"))])
    return TaskSpec(
        task="score" if num_labels == 1 else "classify",
        pooling=(pooling,),
        activation=_activation(config) or usual,
        labels=labels,
        normalizes=False,
        source="config.json",
    )


def writes_text(config: Mapping[str, Any], names: frozenset[str]) -> bool:
    """Whether a causal model with tensors of these names has a language model's head."""
    kinds = [str(kind) for kind in config.get("architectures") or ()]
    if any(kind.endswith(CLASSIFIER) for kind in kinds):
        return False
    if not is_trunk(names):
        return True
    return not any(kind.endswith("Model") for kind in kinds) and bool(config.get("tie_word_embeddings"))


def is_trunk(names: frozenset[str]) -> bool:
    """Whether the tensors have the names of transformers' class without a head, such as those of Qwen3-Embedding."""
    return "embed_tokens.weight" in names and not any(name.startswith("model.") for name in names)


def check_attention(folder: Path) -> None:
    """Raise ModelError for a model whose tokens see those after them, unless it is one of `ENCODERS`: other bases
    compute causal attention."""
    config = _object(folder / "config.json")
    if config.get("model_type") in ENCODERS:
        return
    names = [str(name) for name in config.get("architectures") or ()]
    if (
        config.get("is_causal") is False
        or config.get("use_bidirectional_attention")
        or any("Bidirectional" in name for name in names)
    ):
        raise ModelError(
            "config.json says that its attention is not causal, and of such models only "
            f"{', '.join(sorted(ENCODERS))} are known here"
        )


def adds_end_token(folder: Path) -> bool:
    """Whether tokenizer_config.json asks for an end token, which transformers itself has stopped to add."""
    return _optional(folder / "tokenizer_config.json").get("add_eos_token") is True


def write_task_spec(spec: TaskSpec, folder: Path, base_config: Mapping[str, Any]) -> None:
    """Write into the folder of a model or an adapter what `read_task_spec` needs to find `spec` there.

    `base_config` is the base's config.json. An adapter for vectors gets no config.json, so the sizes that its vectors
    may be cut to stand in its weights' metadata alone. Raises ModelError for what these files cannot say, OSError.
    """
    if spec.task == "embed":
        _write_embed_spec(spec, folder, base_config)
    else:
        _write_classifier_spec(spec, folder, base_config)
    # an end token is for the tokenizer's own file
    found, expected = read_task_spec(folder), dataclasses.replace(spec, end_token=None)
    if spec.task == "embed" and not (folder / "config.json").is_file():
        expected = dataclasses.replace(expected, dimensions=found.dimensions if found else None)
    if found is None or dataclasses.replace(found, source=spec.source) != expected:
        raise ModelError(
            f"the task of {spec.source} cannot be said in files of sentence-transformers and transformers, which would "
            f"be read as {found}; export it with formats=[mlx], or with its head formats=[peft], and serve it here"
        )


def _write_embed_spec(spec: TaskSpec, folder: Path, base_config: Mapping[str, Any]) -> None:
    size = base_config.get("hidden_size") or (base_config.get("text_config") or {}).get("hidden_size")
    if size is None:
        raise ModelError("config.json of the base has no hidden_size, which a Pooling needs; export with formats=[mlx]")
    kinds = ["Transformer", "Pooling", *(["Normalize"] if spec.normalizes else [])]
    paths = [f"{index}_{kind}" if index else "" for index, kind in enumerate(kinds)]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    for path in paths[1:]:
        (folder / path).mkdir()
    pooling = {key: name in spec.pooling for key, name in POOLING_KEYS.items()}
    _write(folder / MODULES, modules)
    _write(folder / paths[1] / "config.json", {"word_embedding_dimension": size, **pooling, "include_prompt": True})
    _write(folder / SENTENCES, {"prompts": dict(spec.prompts), "default_prompt_name": spec.default_prompt})
    limits = {} if spec.max_tokens is None else {"max_seq_length": spec.max_tokens}
    _write(folder / "sentence_bert_config.json", {**limits, "do_lower_case": False})
    if (folder / "config.json").is_file():
        sizes = {"matryoshka_dimensions": list(spec.dimensions)} if spec.dimensions else {}
        old = _object(folder / "config.json")
        kept = {key: old[key] for key in old.keys() - {"is_matryoshka", "matryoshka_dimensions"}}
        _write(folder / "config.json", kept | sizes | ({} if spec.dimensions is None else {"is_matryoshka": True}))


def _write_classifier_spec(spec: TaskSpec, folder: Path, base_config: Mapping[str, Any]) -> None:
    names = [str(name) for name in base_config.get("architectures") or ["Base"]]
    activation = {"sigmoid": "Sigmoid", "softmax": "Softmax", "none": "Identity"}[spec.activation]
    labels = {
        "architectures": [re.sub(r"(For\w+|Model)?$", "", names[0], count=1) + CLASSIFIER],
        "id2label": {str(index): label for index, label in enumerate(spec.labels)},
        "label2id": {label: index for index, label in enumerate(spec.labels)},
        "sentence_transformers": {"activation_fn": f"torch.nn.modules.activation.{activation}"},
    }
    if len(spec.labels) > 1:
        kind = "multi" if spec.activation == "sigmoid" else "single"
        labels["problem_type"] = f"{kind}_label_classification"
    _write(folder / "config.json", {**base_config, **labels})


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def to_json(spec: TaskSpec) -> str:
    return json.dumps(dataclasses.asdict(spec), sort_keys=True)


def from_json(text: str) -> TaskSpec:
    """The inverse of `to_json`. Raises ModelError."""
    try:
        given = dict(json.loads(text))
        fields: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        spec = TaskSpec(**fields)
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"its task cannot be read: {error}") from error
    if spec.task not in get_args(Task) or spec.activation not in get_args(Activation):
        raise ModelError(f"its task {str(spec.task)[:100]!r} or {str(spec.activation)[:100]!r} is not known here")
    _check_pooling(spec.pooling)
    return spec


def _is_classifier(config: Mapping[str, Any]) -> bool:
    return any(str(name).endswith(CLASSIFIER) for name in config.get("architectures") or ())


def _classifier_spec(folder: Path) -> TaskSpec:
    config = _object(folder / "config.json")
    spec = head_spec(len(config.get("id2label") or "01"), config)  # transformers leaves two labels out
    named = _optional(folder / SENTENCES).get("activation_fn")
    return spec if named is None else dataclasses.replace(spec, activation=_known_activation(named, SENTENCES))


def _answer_spec(config: Mapping[str, Any], sentences: Mapping[str, Any]) -> TaskSpec:
    """The spec of sentence-transformers' module LogitScore. Its text comes from settings."""
    named = sentences.get("activation_fn")
    activation = "sigmoid" if named is None else _known_activation(named, SENTENCES)
    ids = [config.get("true_token_id"), config.get("false_token_id")]
    answers = tuple(token for token in ids if token is not None)
    if not answers or ids[0] is None or not all(type(token) is int for token in answers):
        raise ModelError(f"{MODULES}: its LogitScore should have a true_token_id, perhaps a false_token_id")
    return TaskSpec(task="score", pooling=("last",), activation=activation, answers=answers, source=MODULES)


def _activation(config: Mapping[str, Any]) -> Activation | None:
    """The activation that a cross-encoder's config names."""
    own = config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, dict) else config.get("sbert_ce_default_activation_function")
    return None if named is None else _known_activation(named, "config.json")


def _known_activation(named: object, file: str) -> Activation:
    known: Mapping[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "none", "Softmax": "softmax"}
    kind = str(named).rpartition(".")[2]
    if kind not in known:
        raise ModelError(f"{file}: the activation {str(named)[:100]!r} is not known here; there are {[*known]}")
    return known[kind]


def _module(folder: Path, module: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a module. Raises ModelError."""
    path = str(module.get("path", ""))
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise ModelError(f"{MODULES} leads out of its folder")
    return _object(folder / path / "config.json")


def _pooling(config: Mapping[str, Any]) -> tuple[Pooling, ...]:
    named = config.get("pooling_mode")
    if named is not None:
        names = [named] if isinstance(named, str) else list(named)
        chosen = [NAMES.get(str(name), str(name)) for name in names]
        return _check_pooling(chosen)
    switched = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    if unknown := [key for key in switched if key not in POOLING_KEYS]:
        raise ModelError(f"{MODULES}: the pooling {unknown[0][:100]} is not known here")
    return _check_pooling([name for key, name in POOLING_KEYS.items() if key in switched])


def _check_pooling(names: Sequence[str]) -> tuple[Pooling, ...]:
    known = get_args(Pooling)
    for name in names:
        if name not in known:
            raise ModelError(f"the pooling {name[:100]!r} is not known here; there are {', '.join(known)}")
    if not names:
        raise ModelError(f"{MODULES}: its Pooling names no mode")
    return tuple(pooling for name in names for pooling in known if pooling == name)


def _dimensions(folder: Path) -> tuple[int, ...] | None:
    config = _optional(folder / "config.json")
    if sizes := config.get("matryoshka_dimensions"):
        return tuple(sorted(int(size) for size in sizes))
    return () if config.get("is_matryoshka") else None


def _object(path: Path) -> dict[str, Any]:
    value = _read(path)
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} should be a JSON object")
    return value


def _optional(path: Path) -> dict[str, Any]:
    return _object(path) if path.is_file() else {}


def _read(path: Path) -> Any:
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:  # a pipe would be waited for
            raise ModelError(f"{path.parent.name}/{path.name} is no file of at most {MAX_BYTES} bytes")
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.parent.name}/{path.name} cannot be read: {error}") from error
