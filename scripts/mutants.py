"""Mistakes that the tests must notice: a text of the code, what to put in its place, and the tests that must fail.

Each names the fewest tests that should notice it, so that trying it takes seconds.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    name: str
    file: str
    old: str
    """Stands exactly once in the file."""
    new: str
    tests: tuple[str, ...]


CHECKPOINTS = "tests/checkpoint/test_manager.py"
RUNS = "tests/trainer/test_runs.py"
LIVE = "tests/rollout/live/test_source.py"
RESTART = "tests/rollout/live/test_restart.py"

HARMLESS = Mutant(
    name="a comment (control: must survive)",
    file="parallm/checkpoint/files.py",
    old="    # no line end: without its last byte it must not be a manifest\n",
    new="    # another comment\n",
    tests=(CHECKPOINTS,),
)

MUTANTS = (
    # checkpoints
    Mutant(
        name="the name of a checkpoint is not synced to the disk",
        file="parallm/checkpoint/manager.py",
        old="    sync(final.parent)\n",
        new="",
        tests=(CHECKPOINTS,),
    ),
    Mutant(
        name="the folder of named checkpoints is not synced to the disk",
        file="parallm/checkpoint/manager.py",
        old="                sync(self._folder)\n",
        new="",
        tests=(CHECKPOINTS,),
    ),
    Mutant(
        name="files of a checkpoint are not synced to the disk",
        file="parallm/checkpoint/files.py",
        old="        os.fsync(descriptor)\n",
        new="        pass\n",
        tests=(CHECKPOINTS,),
    ),
    Mutant(
        name="checksums of a checkpoint are not compared",
        file="parallm/checkpoint/files.py",
        old="        _verify(folder)\n        values",
        new="        values",
        tests=(f"{CHECKPOINTS}::test_every_single_flipped_bit_of_the_manifest_is_noticed_or_harmless",),
    ),
    Mutant(
        name="the worst checkpoint is kept as the best",
        file="parallm/checkpoint/manager.py",
        old="    return max(scores, key=lambda pair: (pair[0], _step(pair[1])))[1] if scores else None",
        new="    return min(scores, key=lambda pair: (pair[0], _step(pair[1])))[1] if scores else None",
        tests=(CHECKPOINTS,),
    ),
    Mutant(
        name="a run goes on from its oldest checkpoint",
        file="parallm/checkpoint/manager.py",
        old="        for path in reversed(self.checkpoints()):\n",
        new="        for path in self.checkpoints():\n",
        tests=(f"{CHECKPOINTS}::test_auto_resumes_from_the_newest_checkpoint",),
    ),
    Mutant(
        name="a full disk is found out in the middle of a save",
        file="parallm/checkpoint/manager.py",
        old="            if shutil.disk_usage(self._folder).free < needed:\n",
        new="            if False:\n",
        tests=(CHECKPOINTS,),
    ),
    Mutant(
        name="moments of the optimizer are not restored",
        file="parallm/learner/adapter_state.py",
        old="        self.adapter = adapter\n        self._optimizer.restore(optimizer_state)\n",
        new="        self.adapter = adapter\n",
        tests=("tests/learner/test_learner.py::test_a_restored_learner_goes_on_bit_for_bit",),
    ),
    Mutant(
        name="a roll-back keeps the moments of the bad update",
        file="parallm/learner/adapter_state.py",
        old="            self._optimizer.restore(good.optimizer)\n",
        new="",
        tests=("tests/learner/test_faults.py",),
    ),
    Mutant(
        name="rows of the step that is repeated stay",
        file="parallm/metrics/json_lines.py",
        old='        kept = [row for row in read_rows(self.file) if row["step"] < self._drop_from]\n',
        new='        kept = [row for row in read_rows(self.file) if row["step"] <= self._drop_from]\n',
        tests=("tests/metrics/test_json_lines.py",),
    ),
    Mutant(
        name="rows that a full disk refuses are lost",
        file="parallm/metrics/json_lines.py",
        old="            self._bound_memory()\n",
        new="            self._unwritten.clear()\n",
        tests=("tests/metrics/test_json_lines.py",),
    ),
    # trainer
    Mutant(
        name="versions are served without waiting for their evaluation",
        file="parallm/trainer/publication.py",
        old='        self._waits = settings.publish_if == "evaluation"\n',
        new="        self._waits = False\n",
        tests=("tests/trainer/test_policies.py::test_each_policy_waits_for_its_own_evaluations_before_it_is_served",),
    ),
    Mutant(
        name="a version as bad as the margin allows twice is served",
        file="parallm/trainer/publication.py",
        old="        if report.score >= best - self._margin:\n",
        new="        if report.score >= best - 2 * self._margin:\n",
        tests=("tests/trainer/test_recovery.py",),
    ),
    Mutant(
        name="evaluations sample as the first training step does",
        file="parallm/rollout/evaluation.py",
        old="EVALUATION = -1 ",
        new="EVALUATION = 0 ",
        tests=("tests/rollout/test_evaluation.py",),
    ),
    Mutant(
        name="the newest evaluation is the best",
        file="parallm/trainer/evaluations.py",
        old="self._best is None or report.score > self._best",
        new="True",
        tests=(f"{RUNS}::test_the_best_version_is_left_behind_if_asked_for",),
    ),
    Mutant(
        name="the lowest loss is the worst version",
        file="parallm/reports.py",
        old="        return -self.loss if",
        new="        return self.loss if",
        tests=("tests/trainer/test_supervised.py::test_the_best_version_is_that_of_the_lowest_loss",),
    ),
    Mutant(
        name="a best version that was not saved stays the best",
        file="parallm/trainer/evaluations.py",
        old="        if self._parts.adapters.holds(self._parts.policy, self._best_version):\n",
        new="        if True:\n",
        tests=(f"{RUNS}::test_the_best_version_is_kept_over_a_resume_or_said_to_be_gone",),
    ),
    Mutant(
        name="a run goes on from checkpoints of another environment",
        file="parallm/checkpoint/state.py",
        old="        if is_same_run and not lines:\n",
        new="        if False:\n",
        tests=("tests/trainer/test_resuming.py::test_auto_goes_on_with_the_same_run_only",),
    ),
    Mutant(
        name="one fault more than allowed before a roll-back",
        file="parallm/trainer/guard.py",
        old="        if self._skipped_in_row < self._settings.max_skips:\n",
        new="        if self._skipped_in_row <= self._settings.max_skips:\n",
        tests=("tests/trainer/test_guard.py",),
    ),
    Mutant(
        name="roll-backs without end",
        file="parallm/trainer/guard.py",
        old="        self._rollbacks += 1\n",
        new="",
        tests=("tests/trainer/test_guard.py",),
    ),
    Mutant(
        name="a resumed guard has forgotten its faults",
        file="parallm/trainer/guard.py",
        old='        self._skipped_in_row = counters["skipped_in_row"]\n',
        new="",
        tests=("tests/trainer/test_supervised.py::test_a_resumed_run_remembers_its_faults",),
    ),
    Mutant(
        name="what was sampled with an undone version is trained on",
        file="parallm/trainer/staleness.py",
        old="    return any(not 0 <= lag <= limit for lag, _ in _lags(group, version))\n",
        new="    return any(not lag <= limit for lag, _ in _lags(group, version))\n",
        tests=("tests/trainer/test_staleness.py",),
    ),
    Mutant(
        name="tokens one version too old are trained on",
        file="parallm/trainer/staleness.py",
        old="    return any(not 0 <= lag <= limit for lag, _ in _lags(group, version))\n",
        new="    return any(not 0 <= lag <= limit + 1 for lag, _ in _lags(group, version))\n",
        tests=("tests/trainer/test_staleness.py",),
    ),
    Mutant(
        name="problems of interrupted steps are lost",
        file="parallm/rollout/problems.py",
        old="        self._again.extendleft(reversed(places))\n",
        new="",
        tests=("tests/rollout/test_problem_cursor.py",),
    ),
    Mutant(
        name="problems of interrupted steps come in another order",
        file="parallm/rollout/problems.py",
        old="        self._again.extendleft(reversed(places))\n",
        new="        self._again.extendleft(places)\n",
        tests=("tests/rollout/test_problem_cursor.py",),
    ),
    Mutant(
        name="a paused loop takes one step more than asked for",
        file="parallm/trainer/pacing.py",
        old="            self._allowed -= 1\n",
        new="            self._allowed -= 0\n",
        tests=("tests/trainer/test_pacing.py",),
    ),
    Mutant(
        name="an error in a step costs the finished steps",
        file="parallm/trainer/loop.py",
        old="            if not isinstance(error, CheckpointError):\n                await self._rescue()\n",
        new="",
        tests=(f"{RUNS}::test_steps_before_an_error_are_saved_and_the_run_goes_on_from_there",),
    ),
    Mutant(
        name="steps are sampled further ahead than allowed",
        file="parallm/trainer/pipeline.py",
        old="min(step + self._limit + 1, self._num_steps)",
        new="min(step + self._limit + 2, self._num_steps)",
        tests=("tests/trainer/test_pipeline.py",),
    ),
    # live traffic
    Mutant(
        name="a checkpoint costs the trajectories of the step after it",
        file="parallm/rollout/live/buffer.py",
        old="        self.remove(self._contents.reserved_until(step), TRAINED)\n",
        new="        self.remove(self._contents.reserved_until(step + 1), TRAINED)\n",
        tests=(RESTART,),
    ),
    Mutant(
        name="a restart trains again on what a checkpoint holds",
        file="parallm/rollout/live/buffer.py",
        old="        self.saved(step)\n",
        new="",
        tests=(RESTART,),
    ),
    Mutant(
        name="clients' completions of undone versions are trained on",
        file="parallm/rollout/live/source.py",
        old="    return any(not 0 <= version - span.version <= limit for span in one.trajectory.weight_versions)\n",
        new="    return any(not version - span.version <= limit for span in one.trajectory.weight_versions)\n",
        tests=(f"{LIVE}::test_versions_beyond_the_limit_and_abandoned_ones_are_dropped",),
    ),
    Mutant(
        name="a step begins with groups that teach nothing",
        file="parallm/rollout/live/grouping.py",
        old="        good = [pile for pile in piles if has_signal(pile)]\n",
        new="        good = list(piles)\n",
        tests=(f"{LIVE}::test_a_step_waits_for_as_many_groups_with_signal_however_many_there_are_without",),
    ),
    Mutant(
        name="a step takes more groups than it wants",
        file="parallm/rollout/live/grouping.py",
        old="            if sum(map(has_signal, taken)) == self.wanted:\n",
        new="            if sum(map(has_signal, taken)) > self.wanted:\n",
        tests=(f"{LIVE}::test_what_is_more_than_a_step_stays_for_the_next",),
    ),
    Mutant(
        name="a reward that has waited long enough goes on waiting",
        file="parallm/rollout/live/grouping.py",
        old="        return now - _oldest_reward(pile) >= self.settings.live.wait_seconds\n",
        new="        return now - _oldest_reward(pile) > 2 * self.settings.live.wait_seconds\n",
        tests=(f"{LIVE}::test_a_reward_that_waited_long_enough_needs_no_whole_group_and_no_whole_step",),
    ),
    Mutant(
        name="completions of different prompts are compared",
        file="parallm/rollout/live/grouping.py",
        old="                return one.trajectory.problem_id\n",
        new='                return ""\n',
        tests=(LIVE,),
    ),
    # engine, learner, device
    Mutant(
        name="the temperature is not applied",
        file="parallm/engine/sampling/sampler.py",
        old="    softmax = softmax_of(logits_BV, rows.temperatures_B)\n",
        new="    softmax = softmax_of(logits_BV, mx.ones_like(rows.temperatures_B))\n",
        tests=("tests/engine/sampling/test_sampler.py",),
    ),
    Mutant(
        name="log-probs are those after top-k",
        file="parallm/engine/sampling/sampler.py",
        old="    logprobs_B = softmax.logprobs(tokens_B[:, None])[:, 0]\n",
        new=(
            "    kept_BV = filtered(chosen, rows.filters)\n"
            "    share_BV = kept_BV / kept_BV.sum(axis=-1, keepdims=True)\n"
            "    logprobs_B = mx.log(mx.take_along_axis(share_BV, tokens_B[:, None], axis=-1))[:, 0]\n"
        ),
        tests=("tests/engine/sampling/test_sampler.py::test_log_probabilities_are_those_before_the_filters",),
    ),
    Mutant(
        name="versions share what the prefix cache keeps",
        file="parallm/engine/kv/prefix_cache.py",
        old="        path = self._walk(owner, tokens[: most // BLOCK * BLOCK])\n",
        new=(
            "        owner = next(iter(self._roots), owner)\n"
            "        path = self._walk(owner, tokens[: most // BLOCK * BLOCK])\n"
        ),
        tests=("tests/engine/kv/test_prefix_cache.py",),
    ),
    Mutant(
        name="log-probs are of the token after the next",
        file="parallm/learner/passes/batch.py",
        old="            sources += [np.array([len(part.prompt) - 1]), np.arange(first, first + row.length)]\n",
        new="            sources += [np.array([len(part.prompt) - 2]), np.arange(first, first + row.length)]\n",
        tests=("tests/learner/passes/test_gradient.py",),
    ),
    Mutant(
        name="all sites drop the same inputs",
        file="parallm/model/lora/training.py",
        old="dict(zip(sorted(adapter.a_IR), keys, strict=True))",
        new="{site: key for site in adapter.a_IR}",
        tests=("tests/model/lora/test_single.py",),
    ),
    Mutant(
        name="k3 is of the other direction",
        file="parallm/learner/loss/kl.py",
        old="    difference_N = logprobs_N - sampler_N\n",
        new="    difference_N = sampler_N - logprobs_N\n",
        tests=("tests/learner/loss/test_policy_loss.py",),
    ),
    Mutant(
        name="masked tokens count in the means of an update",
        file="parallm/learner/learner.py",
        old="        trained_N = batch.weights_N > 0\n",
        new="        trained_N = batch.weights_N > -1\n",
        tests=("tests/learner/test_reply_tokens.py", "tests/learner/test_learner.py"),
    ),
    Mutant(
        name="masked tokens count in a held-out loss",
        file="parallm/learner/passes/scoring.py",
        old="np.array(scores.logprobs_N)[batch.weights_N > 0]",
        new="np.array(scores.logprobs_N)",
        tests=("tests/learner/test_datasets.py",),
    ),
    Mutant(
        name="shares of the device are the other way round",
        file="parallm/device/governor.py",
        old='            share = self.serving_share if work == "serving" else 1 - self.serving_share\n',
        new='            share = self.serving_share if work != "serving" else 1 - self.serving_share\n',
        tests=("tests/device/test_governor.py",),
    ),
    Mutant(
        name="intervals are as wide as those of 68%",
        file="parallm/rollout/confidence_intervals.py",
        old="Z_95 = 1.959964\n",
        new="Z_95 = 1.0\n",
        tests=("tests/rollout/test_confidence_intervals.py",),
    ),
    Mutant(
        name="pass@k of the wrong samples",
        file="parallm/rollout/confidence_intervals.py",
        old="math.comb(num_samples - correct, k)",
        new="math.comb(correct, k)",
        tests=("tests/rollout/test_confidence_intervals.py",),
    ),
)
