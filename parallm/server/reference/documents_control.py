"""Rows of documents.py for the routes that steer the engine, adapters, splits and training."""

from collections.abc import Mapping
from dataclasses import replace

from parallm.server.control.adapter_bodies import (
    AdapterEntry,
    AdapterList,
    AliasBody,
    Done,
    LoadBody,
    LoadedAdapters,
    NameMeans,
    PromoteBody,
    RollBackBody,
    SwitchBody,
    UnloadBody,
)
from parallm.server.control.control_bodies import (
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
)
from parallm.server.control.routes_training import CheckpointAnswer, TrainingBody
from parallm.server.control.trajectory_bodies import TrajectoryList, TrajectoryRewardAnswer, TrajectoryRewardBody
from parallm.server.control.warm_up import WarmUpAnswer, WarmUpBody
from parallm.server.reference.document import Document, Parameter

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
}
VERSION = {"num_requests": 20, "num_completions": 40, "num_tokens": 1800, "num_rewards": 5, "reward_mean": 0.6}
SPLIT = {"name": "policy", "shares": {"policy@11": 0.9, "policy@12": 0.1}, "versions": {"policy@11": VERSION}}
STATUS = {"state": "paused", "step": 4, "total_steps": 200, "version": 4, "metrics": {"reward/mean": 0.61}}
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
    "POST /v1/requests/{request_id}/cancel": Document(answers=(AbortAnswer,), answer=_aborted),
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
    "GET /v1/queue": Document(
        answers=(QueueAnswer,),
        answer={"num_running": 8, "num_waiting": 2, "num_in_flight": 9, "num_held": 0, "is_paused": False},
    ),
    "GET /v1/adapters": Document(answers=(AdapterList,), answer={"data": [ADAPTER]}),
    "POST /v1/adapters/load": _load,
    "POST /load_adapter": _load,
    "PUT /v1/adapters/{name}": _upload,
    "POST /upload_adapter": replace(_upload, query=(NAME,)),
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
    "POST /model/switch-lora": Document(bodies=(SwitchBody,), example=MEANS, answers=(NameMeans,), answer=MEANS),
    "PUT /v1/splits/{name}": Document(
        bodies=(SplitBody,),
        example={"weights": {"policy@11": 9, "policy@12": 1}},
        answers=(SplitAnswer,),
        answer=SPLIT,
    ),
    "DELETE /v1/splits/{name}": Document(answers=(SplitAnswer,), answer=SPLIT | {"shares": {}}),
    "GET /v1/splits": Document(answers=(SplitList,), answer={"data": [SPLIT]}),
    "POST /v1/rewards": Document(
        bodies=(RewardBody,), example={"id": "cmpl-1f", "reward": 1.0}, answers=(RewardAnswer,), answer={"status": "ok"}
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
    "POST /v1/training/update": _training,
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
