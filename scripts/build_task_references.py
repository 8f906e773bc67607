"""Write tests/tasks/references: numbers of transformers and sentence-transformers for tiny models of their own.

    python -m venv VENV && VENV/bin/pip install torch transformers==5.23.0 sentence-transformers==6.2.0
    VENV/bin/python scripts/build_task_references.py

A reference has the files of a folder, the shapes of its weights with their seed, texts, and what the library makes of
them. It needs nothing of ours.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "tasks"))

from tiny_folders import REFERENCES, write_folder  # noqa: E402

WORDS = "a big cat dog eats fish for in is not of on query passage red river runs sees small the tree under what yes no"
TEXTS = (
    "a big cat sees the small dog",
    "fish",
    "the red tree is not in the river for the dog of the cat " * 2,
    "what runs ?",
)
PAIRS = (
    ("what eats fish ?", "the big cat eats fish"),
    ("what eats fish ?", "a red tree"),
    ("what eats fish ?", "the small dog runs in the river under the red tree and not for the cat"),
    ("what runs", "the river"),
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
CAUSAL = SIZES | {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64}
CAUSAL |= {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}
DIGITS = 8
Make = Callable[[], tuple[dict[str, Any], Any, dict[str, Any]]]


def tokenizer_files(
    specials: Mapping[str, str], template: str | None, pair: str | None, *, types: bool = False, **config: Any
) -> tuple[dict[str, Any], int]:
    """Files of a tokenizer of whole words. Returns them, and the size of the vocabulary."""
    control = sorted({*specials.values(), *("<|im_start|>", "<|im_end|>", "<think>", "</think>")})
    words = [*control, *WORDS.split(), *"?<>:.,/", *["system", "user", "assistant", "Instruct", "Query", "Document"]]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=specials["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(control)
    if template is not None:
        used = [(token, vocabulary[token]) for token in control if token in f"{template} {pair}"]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, pair=pair, special_tokens=used)
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if types else [])]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": names, **specials, **config}
    return {"tokenizer.json": json.loads(tokenizer.to_str()), "tokenizer_config.json": settings}, len(vocabulary)


def modules(pooling: str, *, normalizes: bool = True) -> dict[str, Any]:
    """Files of sentence-transformers for a chain that pools so."""
    chain = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if normalizes else [])]
    return {
        "modules.json": [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (path, kind) in enumerate(chain)
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": 16, f"pooling_mode_{pooling}": True},
    }


BERT = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
ROBERTA = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>"} | {
    "pad_token": "<pad>"
}
QWEN = {"unk_token": "<unk>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
LLAMA = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"}


def bert_files() -> tuple[dict[str, Any], int]:
    return tokenizer_files(BERT, "[CLS] $A [SEP]", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", types=True)


def roberta_files() -> tuple[dict[str, Any], int]:
    return tokenizer_files(ROBERTA, "<s> $A </s>", "<s> $A </s> </s> $B </s>")


def config_of(kind: str, architecture: str, vocabulary: int, **more: Any) -> dict[str, Any]:
    return {"model_type": kind, "architectures": [architecture], "vocab_size": vocabulary} | SIZES | more


def folders() -> dict[str, dict[str, Any]]:
    """What is made, by name: files, the task, and the class whose tensors the folder has."""
    bert, num_bert = bert_files()
    roberta, num_roberta = roberta_files()
    modern, num_modern = tokenizer_files(BERT, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]")
    qwen, num_qwen = tokenizer_files(QWEN, "$A <|endoftext|>", "$A $B <|endoftext|>")
    ranker, num_ranker = tokenizer_files(QWEN, None, None)
    llama, num_llama = tokenizer_files(LLAMA, "<s> $A", "<s> $A $B", add_eos_token=True)
    of_bert = {"type_vocab_size": 2, "max_position_embeddings": 64, "pad_token_id": 0, "layer_norm_eps": 1e-12}
    of_roberta = {"type_vocab_size": 1, "max_position_embeddings": 66, "pad_token_id": 1, "layer_norm_eps": 1e-5}
    of_modern = {"max_position_embeddings": 64, "local_attention": 8, "global_attn_every_n_layers": 2, "norm_eps": 1e-5}
    of_modern |= {"num_hidden_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "pad_token_id": 0}
    labels = {"id2label": {"0": "bad", "1": "so", "2": "good"}, "label2id": {"bad": 0, "so": 1, "good": 2}}
    one = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    causal = CAUSAL | {"tie_word_embeddings": False}
    tied = CAUSAL | {"tie_word_embeddings": True}
    query = f"Instruct: {INSTRUCTION}\nQuery:"
    prompts = {
        "config_sentence_transformers.json": {"prompts": {"query": query, "document": ""}, "default_prompt_name": None}
    }
    identity = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    return {
        "e5": {"task": "embed", "make": AutoModel, "prompts": ["query: ", "passage: "]}
        | {
            "files": bert
            | modules("mean_tokens")
            | {"config.json": config_of("bert", "BertModel", num_bert, **of_bert)}
        },
        "bge_m3": {"task": "embed", "make": AutoModel}
        | {
            "files": roberta
            | modules("cls_token")
            | {"config.json": config_of("xlm-roberta", "XLMRobertaModel", num_roberta, **of_roberta)}
        },
        "modernbert": {"task": "embed", "make": AutoModel}
        | {
            "files": modern
            | modules("cls_token", normalizes=False)
            | {"config.json": config_of("modernbert", "ModernBertModel", num_modern, **of_modern)}
        },
        "qwen3_embedding": {"task": "embed", "make": AutoModel, "prompt_name": "query"}
        | {
            "files": qwen
            | modules("lasttoken")
            | prompts
            | {"config.json": config_of("qwen3", "Qwen3ForCausalLM", num_qwen, **tied)}
        },
        "e5_mistral": {"task": "embed", "make": AutoModel, "end": "</s>"}
        | {
            "files": llama
            | modules("lasttoken")
            | {"config.json": config_of("mistral", "MistralModel", num_llama, **causal)}
        },
        "bert_reranker": {"task": "score", "make": AutoModelForSequenceClassification}
        | {
            "files": bert
            | {"config.json": config_of("bert", "BertForSequenceClassification", num_bert, **of_bert, **one)}
        },
        "minilm_reranker": {"task": "score", "make": AutoModelForSequenceClassification}
        | {
            "files": bert
            | {
                "config.json": config_of(
                    "bert", "BertForSequenceClassification", num_bert, **of_bert, **one, **identity
                )
            }
        },
        "xlm_roberta_reranker": {"task": "score", "make": AutoModelForSequenceClassification}
        | {
            "files": roberta
            | {
                "config.json": config_of(
                    "xlm-roberta", "XLMRobertaForSequenceClassification", num_roberta, **of_roberta, **one
                )
            }
        },
        "modernbert_classifier": {"task": "classify", "make": AutoModelForSequenceClassification}
        | {
            "files": modern
            | {
                "config.json": config_of(
                    "modernbert",
                    "ModernBertForSequenceClassification",
                    num_modern,
                    **of_modern,
                    **labels,
                    classifier_pooling="mean",
                )
            }
        },
        "roberta_classifier": {"task": "classify", "make": AutoModelForSequenceClassification}
        | {
            "files": roberta
            | {
                "config.json": config_of(
                    "roberta",
                    "RobertaForSequenceClassification",
                    num_roberta,
                    **of_roberta,
                    **labels,
                    problem_type="multi_label_classification",
                )
            }
        },
        "qwen3_classifier": {"task": "classify", "make": AutoModelForSequenceClassification}
        | {
            "files": ranker
            | {
                "config.json": config_of(
                    "qwen3", "Qwen3ForSequenceClassification", num_ranker, **causal, **labels, pad_token_id=0
                )
            }
        },
        "qwen3_reranker": {"task": "answer", "make": AutoModelForCausalLM}
        | {"files": ranker | {"config.json": config_of("qwen3", "Qwen3ForCausalLM", num_ranker, **tied)}},
        "qwen3_reranker_untied": {"task": "answer", "make": AutoModelForCausalLM}
        | {"files": ranker | {"config.json": config_of("qwen3", "Qwen3ForCausalLM", num_ranker, **causal)}},
    }


def build(name: str, row: Mapping[str, Any], seed: int) -> dict[str, Any]:
    config = AutoConfig.for_model(**row["files"]["config.json"])
    tensors = row["make"].from_config(config).state_dict()
    left_out = {"lm_head.weight"} if row["files"]["config.json"].get("tie_word_embeddings") else set()
    shapes = {
        key: list(array.shape) for key, array in tensors.items() if key not in left_out and array.is_floating_point()
    }
    reference = {"task": row["task"], "seed": seed, "files": row["files"], "tensors": shapes}
    with tempfile.TemporaryDirectory() as folder:
        write_folder(reference, Path(folder))
        reference |= TASKS[row["task"]](folder, row)
    return reference


def embed(folder: str, row: Mapping[str, Any]) -> dict[str, Any]:
    model = SentenceTransformer(folder, device="cpu")
    found: dict[str, Any] = {"texts": TEXTS}
    if "prompts" in row:  # the users' own, as e5's model card says
        found["texts"] = [row["prompts"][index % 2] + text for index, text in enumerate(TEXTS)]
    # since transformers 5 the tokenizer forgets to end texts; mteb ends them by hand
    given = [text + " " + row["end"] if "end" in row else text for text in found["texts"]]
    found["vectors"] = rounded(model.encode(given, batch_size=3))
    if "prompt_name" in row:
        found |= {"prompt_name": row["prompt_name"]}
        found["prompted"] = rounded(model.encode(given, prompt_name=row["prompt_name"], batch_size=3))
    return found


def score(folder: str, row: Mapping[str, Any]) -> dict[str, Any]:
    model = CrossEncoder(folder, device="cpu")
    raw = model.predict(PAIRS, batch_size=3, activation_fn=torch.nn.Identity())
    return {"pairs": PAIRS, "scores": rounded(model.predict(PAIRS, batch_size=3)), "logits": rounded(raw)}


def classify(folder: str, row: Mapping[str, Any]) -> dict[str, Any]:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder)
    logits = [model(**tokenizer(text, return_tensors="pt")).logits[0].detach() for text in TEXTS]
    is_multi = row["files"]["config.json"].get("problem_type") == "multi_label_classification"
    found = [one.sigmoid() if is_multi else one.softmax(-1) for one in logits]
    return {"texts": TEXTS, "logits": rounded(torch.stack(logits)), "probabilities": rounded(torch.stack(found))}


def answer(folder: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """The scores of Qwen3-Reranker's model card: the softmax of yes and no after its text."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    before = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    after = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    words = [tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes")]
    scores, logits = [], []
    for query, document in PAIRS:
        text = f"<Instruct>: {INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        ids = [token for part in (before, text, after) for token in tokenizer.encode(part, add_special_tokens=False)]
        last = model(torch.tensor([ids])).logits[0, -1, words].detach()
        scores.append(last.softmax(-1)[1])
        logits.append(last[1] - last[0])
    return {"pairs": PAIRS, "scores": rounded(torch.stack(scores)), "logits": rounded(torch.stack(logits))}


TASKS: Mapping[str, Callable[[str, Mapping[str, Any]], dict[str, Any]]] = {
    "embed": embed,
    "score": score,
    "classify": classify,
    "answer": answer,
}


def rounded(values: Any) -> Any:
    """Numbers with as many digits as float32 has."""
    if isinstance(values, Sequence):
        return [rounded(value) for value in values]
    return (
        rounded(values.tolist()) if hasattr(values, "tolist") and values.ndim else float(f"{float(values):.{DIGITS}g}")
    )


if __name__ == "__main__":
    REFERENCES.mkdir(exist_ok=True)
    for seed, (name, row) in enumerate(folders().items()):
        text = json.dumps(build(name, row, seed))
        (REFERENCES / f"{name}.json").write_text(text + "\n")
        print(f"{name}: {len(text)} bytes")
