"""Rows of documents.py for the routes that steer the engine, adapters, splits and training."""

from collections.abc import Mapping
from dataclasses import replace

from parallm.server.control.routes_adapters import (
    AdapterEntry,
    AdapterList,
    AliasBody,
    Done,
    LoadBody,
    LoadedAdapters,
    LoadPolicyBody,
    NameMeans,
    PolicyMoved,
    PromoteBody,
    RollBackBody,
    SwitchBody,
    UnloadBody,
)
from parallm.server.control.routes_engine import (
    AbortAnswer,
    AbortManyBody,
    AbortOneBody,
    CachesAnswer,
    IsPaused,
    NoFields,
    PauseAnswer,
    PauseBody,
    QueueAnswer,
    RewardAnswer,
    RewardBody,
    SplitAnswer,
    SplitBody,
    SplitList,
    WarmUpAnswer,
    WarmUpBody,
)
from parallm.server.control.routes_scores import ScoreAnswer, ScoreBody
from parallm.server.control.routes_shares import SharesAnswer, SharesBody
from parallm.server.control.routes_training import CheckpointAnswer, TrainingBody, UpdateBody
from parallm.server.control.routes_trajectories import TrajectoryList, TrajectoryRewardAnswer, TrajectoryRewardBody
from parallm.server.reference.document import FORM, Document, Parameter

ADAPTER = {
    "id": "poet@3",
    "name": "poet",
    "version": 3,
    "parent": 2,
    "step": 0,
    "rank": 16,
    "alpha": 32.0,
    "rslora": False,
    "is_dora": False,
    "aliases": ["best"],
    "digest": "9f",
    "num_running": 0,
    "is_served": True,
    "num_bytes": 2_490_368,
}
VERSION = {"num_requests": 20, "num_completions": 40, "num_tokens": 1800, "num_rewards": 5, "reward_mean": 0.6}
SPLIT = {"name": "policy", "shares": {"policy@11": 0.9, "policy@12": 0.1}, "versions": {"policy@11": VERSION}}
STATUS = {"state": "paused", "step": 4, "total_steps": 200, "version": 4, "metrics": {"reward/mean": 0.61}}
UPDATE = {
    "version": 5,
    "is_served": True,
    "has_moved": True,
    "num_trajectories": 2,
    "num_trained": 2,
    "num_recomputed": 2,
    "num_tokens": 4,
    "loss": -0.01,
    "gradient_norm": 0.7,
    "kl_to_behaviour": 0.0,
    "skipped": None,
    "checkpoint": "checkpoints/run/2026-11-21_10-00-00/named/manual-update-1",
}
MEANS = {"name": "poet", "version": 3}
FOLDER = {"name": "poet", "path": "poet/adapter"}
TOLD = {"status": "ok", "success": True, "error_message": None, "loaded_adapters": {"poet": "poet/adapter"}}

MODE = Parameter(
    name="mode",
    description="What becomes of requests that run.",
    choices=("abort", "wait", "keep"),
    default="abort",
)
NAME = Parameter(name="name", description="Of the adapter.", is_required=True)

_pause = Document(
    bodies=(PauseBody,),
    example={"mode": "keep"},
    answers=(PauseAnswer,),
    answer={"status": "paused", "is_paused": True},
)
_resume = Document(
    bodies=(NoFields,), example={}, answers=(PauseAnswer,), answer={"status": "resumed", "is_paused": False}
)
_aborted = {"status": "aborted", "aborted": 1}
_reset = Document(answers=(CachesAnswer,), answer={"success": True})
_load_told = Document(bodies=(LoadBody,), example=FOLDER, answers=(LoadedAdapters,), answer=TOLD)
_load = Document(bodies=(LoadBody,), example=FOLDER, answers=(AdapterEntry,), answer=ADAPTER)
_upload = Document(body_type="application/zip", answers=(AdapterEntry,), answer=ADAPTER)
_training = Document(bodies=(TrainingBody,), example={"policy": None}, answer=STATUS)
_checkpoint = Document(
    bodies=(TrainingBody,),
    example={},
    answers=(CheckpointAnswer,),
    answer={"folders": {"policy": "checkpoints/run/2026-11-21_10-00-00/step_000004"}},
)
_queue = Document(
    answers=(QueueAnswer,),
    answer={"num_running": 8, "num_waiting": 2, "num_in_flight": 9, "num_held": 0, "is_paused": False},
)
_shares = Document(answers=(SharesAnswer,), answer={"serving_share": 0.9, "engine_share": 0.5}, errors=(409,))
_absent = Document(answer={})

CONTROL_DOCUMENTS: Mapping[str, Document] = {
    "POST /pause": Document(query=(MODE,), answers=(PauseAnswer,), answer={"status": "paused", "is_paused": True}),
    "POST /pause_generation": _pause,
    "POST /areal_pause_generation": _pause,
    "POST /resume": _resume,
    "POST /continue_generation": _resume,
    "POST /areal_continue_generation": _resume,
    "GET /is_paused": Document(answers=(IsPaused,), answer={"is_paused": False}),
    "POST /abort_requests": Document(
        bodies=(AbortManyBody,), example={"request_ids": ["job-7"]}, answers=(AbortAnswer,), answer=_aborted
    ),
    "POST /v1/requests/{request_id}/cancel": Document(answers=(AbortAnswer,), answer=_aborted, errors=(404,)),
    "POST /abort_request": Document(
        bodies=(AbortOneBody,), example={"rid": "job-7"}, answers=(AbortAnswer,), answer=_aborted
    ),
    "POST /reset_prefix_cache": _reset,
    "GET /flush_cache": _reset,
    "POST /flush_cache": _reset,
    "POST /v1/warmup": Document(
        bodies=(WarmUpBody,),
        example={"rows": 4, "prompt_tokens": 16},
        answers=(WarmUpAnswer,),
        answer={"seconds": {"1": 0.21, "2": 0.05, "4": 0.06}},
    ),
    "GET /v1/queue": _queue,
    "GET /v1/queue/stats": _queue,
    "GET /v1/adapters": Document(answers=(AdapterList,), answer={"data": [ADAPTER]}),
    "POST /v1/adapters/load": _load,
    "POST /load_adapter": Document(
        bodies=(LoadBody, LoadPolicyBody),
        example=FOLDER,
        others={"the policy that is served moves": {"adapter_path": "poet/adapter"}},
        answers=(AdapterEntry, PolicyMoved),
        answer=ADAPTER,
    ),
    "PUT /v1/adapters/{name}": _upload,
    "POST /upload_adapter": Document(
        query=(replace(NAME, is_required=False),),
        body_type=FORM,
        answers=(PolicyMoved, AdapterEntry),
        answer={"status": "success", "policy_version": 13, "message": "Loaded adapter from poet.zip"},
    ),
    "POST /update_adapter_weights": Document(
        query=(NAME,), body_type="application/octet-stream", answers=(AdapterEntry,), answer=ADAPTER
    ),
    "DELETE /v1/adapters/{model}": Document(answers=(Done,), answer={"status": "ok"}),
    "POST /v1/adapters/promote": Document(bodies=(PromoteBody,), example=MEANS, answers=(NameMeans,), answer=MEANS),
    "POST /v1/adapters/rollback": Document(
        bodies=(RollBackBody,), example={"name": "poet"}, answers=(NameMeans,), answer=MEANS
    ),
    "POST /v1/adapters/aliases": Document(
        bodies=(AliasBody,), example=MEANS | {"alias": "liked"}, answers=(Done,), answer={"status": "ok"}
    ),
    "DELETE /v1/adapters/{name}/aliases/{alias}": Document(answers=(Done,), answer={"status": "ok"}),
    "POST /v1/load_lora_adapter": Document(
        bodies=(LoadBody,),
        example=FOLDER,
        media_type="text/plain",
        answer={"text": "Success: LoRA adapter 'poet' added successfully."},
    ),
    "POST /v1/unload_lora_adapter": Document(
        bodies=(UnloadBody,),
        example={"name": "poet"},
        media_type="text/plain",
        answer={"text": "Success: LoRA adapter 'poet' removed successfully."},
    ),
    "POST /load_lora_adapter": _load_told,
    "POST /skyrl/v1/load_lora_adapter": _load_told,
    "POST /unload_lora_adapter": Document(
        bodies=(UnloadBody,), example={"name": "poet"}, answers=(LoadedAdapters,), answer=TOLD
    ),
    "POST /model/switch-lora": Document(
        bodies=(SwitchBody,),
        example=MEANS,
        others={"the policy, by a word": {"version": "checkpoint-3"}},
        answers=(NameMeans,),
        answer=MEANS,
    ),
    "PUT /v1/splits/{name}": Document(
        bodies=(SplitBody,),
        example={"weights": {"policy@11": 9, "policy@12": 1}},
        answers=(SplitAnswer,),
        answer=SPLIT,
    ),
    "DELETE /v1/splits/{name}": Document(answers=(SplitAnswer,), answer=SPLIT | {"shares": {}}),
    "GET /v1/splits": Document(answers=(SplitList,), answer={"data": [SPLIT]}),
    "GET /v1/shares": _shares,
    "PUT /v1/shares": replace(_shares, bodies=(SharesBody,), example={"serving_share": 0.9}),
    "POST /v1/rewards": Document(
        bodies=(RewardBody,), example={"id": "cmpl-1f", "reward": 1.0}, answers=(RewardAnswer,), answer={"status": "ok"}
    ),
    "POST /v1/rewards/score": Document(
        bodies=(ScoreBody,),
        example={"model": "reward", "input": ["2 + 3 = 5", "2 + 3 = 6"]},
        others={
            "completions of a prompt": {"prompt": "2 + 3 =", "completions": [" 5", " 6"]},
            "the end of a chat": {
                "messages": [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}],
            },
        },
        answers=(ScoreAnswer,),
        answer={
            "object": "list",
            "model": "reward",
            "data": [{"index": 0, "object": "score", "score": 1.3}, {"index": 1, "object": "score", "score": -0.4}],
            "usage": {"prompt_tokens": 16, "total_tokens": 16},
        },
    ),
    "GET /v1/trajectories": Document(
        answers=(TrajectoryList,),
        answer={
            "data": {
                "policy": {
                    "num_waiting": 5,
                    "num_rewarded": 3,
                    "num_reserved": 0,
                    "oldest_seconds": 41.5,
                    "num_collected": 200,
                    "num_trained": 176,
                    "dropped": {"no_reward": 16},
                }
            }
        },
    ),
    "POST /v1/trajectories/{trajectory_id}/reward": Document(
        bodies=(TrajectoryRewardBody,),
        example={"reward": {"right": 1, "short": 0.5}},
        answers=(TrajectoryRewardAnswer,),
        answer={"id": "cmpl-1f-0", "reward": 1.5},
        is_stored=True,
    ),
    "GET /debug/training": Document(answer=STATUS),
    "POST /v1/training/pause": _training,
    "POST /v1/training/resume": _training,
    "POST /v1/training/update": Document(
        bodies=(UpdateBody,),
        example={},
        others={
            "on given trajectories": {
                "trajectories": [
                    {"prompt": "2 + 3 =", "completion": " 5", "reward": 1.0},
                    {"prompt": "2 + 3 =", "completion": " 6", "reward": 0.0},
                ],
                "update_inference": True,
                "checkpoint_name": "manual-update-1",
            },
        },
        answer=STATUS | {"update": UPDATE},
    ),
    "POST /v1/training/checkpoint": _checkpoint,
    "POST /training/checkpoint": _checkpoint,
    "POST /init_communicator/": _absent,
    "POST /update_named_param/": _absent,
    "POST /init_weight_transfer_engine": _absent,
    "POST /start_weight_update": _absent,
    "POST /finish_weight_update": _absent,
    "POST /init_weights_update_group": _absent,
    "POST /update_weights": _absent,
    "POST /update_weights_from_disk": _absent,
    "POST /update_weights_from_distributed": _absent,
    "POST /update_weights_from_tensor": _absent,
    "POST /load_lora_adapter_from_tensors": _absent,
}
