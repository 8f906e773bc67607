"""Trains with TRL's GRPOTrainer on torch's CPU and counts the completions it samples until it is good enough.

Runs in an environment of its own without MLX; of ours it imports only the problems, their order and their scores. What
is not named here has TRL's default: advantages divided by the standard deviation of their group, clipping at 0.2 (which
never acts: one update for each batch of samples), no refill of groups without signal.
"""

import json
import sys
import tempfile
import time
from typing import Any

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from parallm.environment.arithmetic import Arithmetic
from parallm.environment.settings import ArithmeticSettings
from parallm.rollout.problems import ProblemStream

JOB = json.loads(sys.argv[1])
CONFIG = JOB["config"]
"""The settings of our run, as it wrote them down."""
ROLLOUT, LEARNER, LORA = CONFIG["rollout"], CONFIG["learner"], CONFIG["model"]["lora"]
ENVIRONMENT = Arithmetic(ArithmeticSettings(**CONFIG["environment"]))
TEST = ENVIRONMENT.problems("test")[: CONFIG["trainer"]["evaluate_problems"]]
STEPS, EVALUATE_EVERY = CONFIG["trainer"]["steps"], CONFIG["trainer"]["evaluate_every"]


def main() -> None:
    transformers.set_seed(CONFIG["seed"])  # the trainer draws LoRA's A before it sets its own seed
    tokenizer = AutoTokenizer.from_pretrained(JOB["model"], padding_side="left")
    stream = ProblemStream(ENVIRONMENT.problems("train"), CONFIG["seed"])
    problems = [stream.at(index) for index in range(STEPS * ROLLOUT["problems_per_step"])]
    watcher = Watcher(tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(JOB["model"], dtype=torch.float32),
            processing_class=tokenizer,
            reward_funcs=[Reward(problems)],
            args=arguments(folder),
            train_dataset=Dataset.from_list(
                [{"prompt": turns(problem), "place": place} for place, problem in enumerate(problems)]
            ),
            peft_config=LoraConfig(
                r=LORA["rank"], lora_alpha=LORA["alpha"], lora_dropout=LORA["dropout"], target_modules=LORA["targets"]
            ),
            callbacks=[watcher],
        )
        set_schedule(trainer)
        trainer.train()
    print(json.dumps({"accuracies": watcher.accuracies, "seconds": watcher.seconds, "sampled": watcher.sampled}))


def arguments(folder: str) -> GRPOConfig:
    rows = ROLLOUT["problems_per_step"] * ROLLOUT["group_size"]
    return GRPOConfig(
        output_dir=folder,
        seed=CONFIG["seed"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,  # slower, and the gradient is the same
        max_steps=STEPS,
        per_device_train_batch_size=rows,
        steps_per_generation=1,
        num_generations=ROLLOUT["group_size"],
        max_completion_length=ROLLOUT["max_tokens"],
        temperature=ROLLOUT["temperature"],
        top_p=1.0,
        top_k=0,
        shuffle_dataset=False,
        loss_type="dapo",
        beta=0.0,
        learning_rate=LEARNER["learning_rate"],
        adam_beta1=LEARNER["betas"][0],
        adam_beta2=LEARNER["betas"][1],
        adam_epsilon=LEARNER["epsilon"],
        weight_decay=LEARNER["weight_decay"],
        max_grad_norm=LEARNER["max_gradient_norm"],
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
    )


def set_schedule(trainer: GRPOTrainer) -> None:
    """Our learning rates: transformers' own warm-up starts with a step of rate zero."""
    if LEARNER["schedule"] != "constant":
        raise ValueError(f"learner.schedule={LEARNER['schedule']}: this comparison knows only constant")
    trainer.create_optimizer()
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        trainer.optimizer, lambda step: min(1.0, (step + 1) / max(1, LEARNER["warmup_steps"]))
    )


def turns(problem: Any) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in problem.messages]


class Reward:
    """Our environment's weighted score. GRPOTrainer calls it with one value of each column per completion."""

    __name__ = "score"

    def __init__(self, problems: Any) -> None:
        self.problems = problems

    def __call__(self, completions: list[Any], place: list[int], **_: Any) -> list[float]:
        pairs = zip(place, completions, strict=True)
        parts = [ENVIRONMENT.score(self.problems[one], completion[0]["content"]) for one, completion in pairs]
        return [sum(ENVIRONMENT.weights[name] * value for name, value in part.items()) for part in parts]


class Watcher(TrainerCallback):
    """Times the steps, evaluates every few of them outside of that time, and ends the run once it is good enough."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.accuracies: list[tuple[int, float]] = []  # step, greedy accuracy on held-out problems
        self.seconds: list[float] = []
        self.sampled: list[int] = []  # completions of each step
        self.began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.evaluate(others["model"], state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began)
        self.sampled.append(args.per_device_train_batch_size)
        if state.global_step % EVALUATE_EVERY == 0 or state.global_step == STEPS:
            self.evaluate(others["model"], state.global_step)
            control.should_training_stop = self.accuracies[-1][1] >= JOB["target"]

    def evaluate(self, model: Any, step: int) -> None:
        was_training = model.training
        model.eval()
        texts = self.greedy(model)
        model.train(was_training)
        right = [ENVIRONMENT.score(one, text)["correct"] for one, text in zip(TEST, texts, strict=True)]
        self.accuracies.append((step, sum(right) / len(right)))
        print(f"step {step}: {self.accuracies[-1][1]:.3f} held-out, {sum(self.seconds):.0f} s", file=sys.stderr)

    def greedy(self, model: Any) -> list[str]:
        """All problems at once, with the model's own `generate`."""
        prompts = [turns(problem) for problem in TEST]
        inputs = self.tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
        )
        with torch.no_grad():
            tokens = model.generate(**inputs, do_sample=False, temperature=None, max_new_tokens=ROLLOUT["max_tokens"])
        return self.tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


main()
