"""The reports of several workers, such as metrics, as one text or one object."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from pydantic_core import from_json, to_json

from parallm.distributed.front.relay import Answer
from parallm.distributed.front.workers import Workers

SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>.*)")


def labelled(texts: Mapping[str, str]) -> str:
    """Join texts in Prometheus's format; each gets its key as the label `worker`.

    All samples of a family stand together, as the format wants it.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for worker, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("#"):
                family = line.split(" ", 3)[2]
                head = heads.setdefault(family, [])
                if line not in head and len(head) < 2:
                    head.append(line)
            elif match := SAMPLE.fullmatch(line):
                labels = f'worker="{worker}"' + (f",{match['labels']}" if match["labels"] else "")
                samples.setdefault(family, []).append(f"{match['name']}{{{labels}}} {match['value']}")
    lines = [line for family, own in samples.items() for line in (*heads.get(family, ()), *own)]
    return "\n".join(lines) + "\n"


def own_text(registry: CollectorRegistry, workers: Workers) -> str:
    """Return what a front counts itself, in Prometheus's format."""
    samples = {
        "parallm:front_waiting": ("Requests that wait for a worker.", {"": workers.num_waiting}),
        "parallm:front_worker_up": ("1 while it is ready.", {str(one.rank): int(one.is_up) for one in workers.all}),
        "parallm:front_worker_rows": ("Rows that it computes.", {str(one.rank): one.load for one in workers.all}),
    }
    lines = []
    for name, (text, values) in samples.items():
        lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
        lines += [f'{name}{{rank="{rank}"}} {value}' if rank else f"{name} {value}" for rank, value in values.items()]
    return generate_latest(registry).decode() + "\n".join(lines)


def joined(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Join the JSON form of metrics: numbers are added, and samples get the label `worker`."""
    plain = added([{name: value for name, value in own.items() if name != "metrics"} for own in values.values()])
    plain["current_policy_version"] = next(iter(values.values())).get("current_policy_version")
    samples: dict[str, list[Any]] = {}
    for worker, own in values.items():
        for name, found in own.get("metrics", {}).items():
            new = [{**sample, "labels": {"worker": worker, **sample["labels"]}} for sample in found]
            samples.setdefault(name, []).extend(new)
    return {**plain, "metrics": samples}


def sum_of(answers: Sequence[Answer]) -> Answer:
    """Return one answer with the numbers of all added."""
    body = to_json(added([from_json(answer.body) for answer in answers]))
    headers = [pair for pair in answers[0].headers if pair[0] != b"content-length"]
    return Answer(answers[0].status, [*headers, (b"content-length", b"%d" % len(body))], body)


def added(values: Sequence[Any]) -> Any:
    """Add up answers of one form: numbers are summed, flags hold if one does, other values are those of the first.

    Means are weighted (`reward_mean` by `num_rewards`), and objects in lists are matched by their `name`.
    """
    first = values[0]
    if isinstance(first, bool):
        return any(values)
    if isinstance(first, int | float):
        return sum(value for value in values if isinstance(value, int | float))
    if isinstance(first, dict):
        return _added_objects([value for value in values if isinstance(value, dict)])
    if isinstance(first, list):
        named: dict[Any, list[Any]] = {}
        for item in (item for value in values if isinstance(value, list) for item in value):
            named.setdefault(item.get("name") if isinstance(item, dict) else str(item), []).append(item)
        return [added(items) for items in named.values()]
    return first


def _added_objects(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(name for value in values for name in value)
    total = {name: added([value[name] for value in values if name in value]) for name in names if name != "shares"}
    if "shares" in names:  # of a split, the same at all workers
        total["shares"] = values[0].get("shares")
    if "reward_mean" in total:
        rewards = [
            (value["reward_mean"], value["num_rewards"]) for value in values if value.get("reward_mean") is not None
        ]
        number = sum(count for _, count in rewards)
        total["reward_mean"] = sum(mean * count for mean, count in rewards) / number if number else None
    return total
