// The metrics that a person asks for first: label, format, meaning. All others are listed by the prefix of their names.
import { cut, duration, number, percent } from "./format.js";

const share = percent;
const seconds = duration;

/** Sections in the order of reading: [title, [[name, label, format, meaning], ...]]. */
export const SECTIONS = [
  ["Learning", [
    ["reward/mean", "Reward", number, "Mean of the step's completions. Look at its trend."],
    ["heldout/accuracy", "Held-out accuracy", share, "Share solved of problems that are never trained on, with a 95% interval."],
    ["heldout/loss", "Held-out loss", number, ""],
    ["update/loss", "Loss", number, "With rewards its height says nothing about quality."],
    ["update/accuracy", "Accuracy on pairs", share, ""],
    ["groups/signal", "Groups with signal", share, "Groups with different rewards. The others teach nothing."],
    ["completion/length_mean", "Length", number, "Mean tokens of a completion."],
    ["completion/truncated_fraction", "Cut off", share, "Completions that ended at the limit of tokens."],
  ]],
  ["Soundness", [
    ["update/kl_to_behaviour", "KL to the sampling policy", number, "Distance from the policy that sampled, nats a token (k3)."],
    ["update/kl_to_base", "KL to the base", number, "Distance from the base model, nats a token."],
    ["update/entropy", "Entropy", number, "Nats a token. Near 0 the policy tries nothing new."],
    ["update/gradient_norm", "Gradient norm", number, "Before clipping. Jumps mark unusual steps."],
    ["update/clip_fraction", "Clipped tokens", share, "Tokens whose ratio left the trust region."],
    ["offpolicy/lag_mean", "Lag", number, "Age of the step's completions, in versions."],
    ["parity/mean_abs", "Engine against learner", number, "Mean difference of their log-probs; 0 is equal."],
    ["update/learning_rate", "Learning rate", number, ""],
  ]],
  ["Speed", [
    ["rollout/tokens_per_second", "Rollout", number, "Tokens a second sampled for training."],
    ["serving/tokens_per_second", "Serving", number, "Tokens a second for clients."],
    ["seconds/total", "Seconds a step", seconds, ""],
    ["seconds/rollout", "Seconds of rollout", seconds, ""],
    ["seconds/update", "Seconds of update", seconds, ""],
  ]],
];

const KNOWN = new Map(SECTIONS.flatMap(([section, rows]) => rows.map(([name, label, format, help]) => [name, { name, label, format, help, section }])));

/** Return {name, label, format, help, section} of any metric. */
export function metricOf(name) {
  return KNOWN.get(name) ?? { name, label: cut(name, 80), format: number, help: "", section: name.split("/")[0] };
}

/** Return the column of a name; shares that no step names are made from what it counts. */
export function columnOf(history, name) {
  if (name !== "groups/signal") return history.column(name);
  const signal = history.column("groups/with_signal");
  const all = history.column("groups/sampled");
  if (!signal || !all) return null;
  const part = (kind) => signal[kind].map((value, index) => (all.high[index] ? value / all.high[index] : NaN));
  return { low: part("low"), high: part("high"), last: part("last") };
}

/** Return the newest number of a column, null without one. */
export function newest(column) {
  const last = column?.last ?? [];
  for (let index = last.length - 1; index >= 0; index--) if (!Number.isNaN(last[index])) return last[index];
  return null;
}

/** Return names of a run by section, those that a person asks for first, then the rest by prefix. */
export function sectionsOf(names, evaluations = []) {
  const there = new Set(names);
  if (there.has("groups/with_signal")) there.add("groups/signal");
  for (const row of evaluations) for (const name of Object.keys(row)) if (typeof row[name] === "number" && isMeasure(name)) there.add(name);
  const first = SECTIONS.map(([title, rows]) => [title, rows.map(([name]) => name).filter((name) => there.has(name))]);
  const rest = Map.groupBy([...there].filter((name) => !KNOWN.has(name)).sort(), (name) => name.split("/")[0]);
  return [...first, ...rest].filter(([, list]) => list.length);
}

const isMeasure = (name) => name.startsWith("heldout") && !/_(low|high)$|\/(low|high|version|problems|demonstrations|samples|temperature)$/.test(name);

/** Return [low, high] of a measure of an evaluation, or null. */
export function intervalOf(row, name) {
  const [low, high] = name === "heldout/accuracy" ? ["heldout/low", "heldout/high"] : [`${name}_low`, `${name}_high`];
  return typeof row[low] === "number" && typeof row[high] === "number" ? [row[low], row[high]] : null;
}

const WINDOW = 10;
const APART = 3;

/** Say whether a run learns and from which step on: {word: good|look|bad|"", text}.

By evaluations where there are two: intervals of 95% that do not meet the first one's. Else by the reward: the first mean
over ten points that is three standard errors above that of the first ten. */
export function verdictOf(history, evaluations) {
  const measured = evaluations.filter((row) => intervalOf(row, "heldout/accuracy"));
  return measured.length > 1 ? byEvaluations(measured) : byReward(history);
}

function byEvaluations(rows) {
  const [first, newest] = [rows[0], rows.at(-1)];
  const [low, high] = intervalOf(first, "heldout/accuracy");
  const change = `held-out accuracy ${percent(first["heldout/accuracy"])} at step ${first.step}, ${percent(newest["heldout/accuracy"])} at step ${newest.step}`;
  const above = rows.find((row) => intervalOf(row, "heldout/accuracy")[0] > high);
  const [newLow, newHigh] = intervalOf(newest, "heldout/accuracy");
  if (newHigh < low) return { word: "bad", text: `It got worse: ${change}.` };
  if (above && newLow > high) return { word: "good", text: `Yes, beyond doubt from step ${above.step} on: ${change}.` };
  if (above) return { word: "look", text: `It had learned at step ${above.step} and lost it since: ${change}.` };
  return { word: "look", text: `Not to be told yet: ${change}; the intervals meet.` };
}

function byReward(history) {
  const column = history && columnOf(history, "reward/mean");
  const points = column ? history.starts.map((step, index) => [step, column.last[index]]).filter(([, value]) => !Number.isNaN(value)) : [];
  if (points.length < 2 * WINDOW) return { word: "", text: `Too early to say: ${points.length} of ${2 * WINDOW} steps.` };
  const first = moments(points.slice(0, WINDOW));
  const last = moments(points.slice(-WINDOW));
  const change = `mean reward of ten steps ${number(first.mean, 3)} at first, ${number(last.mean, 3)} now`;
  const distance = (one) => (one.mean - first.mean) / Math.hypot(first.error, one.error, 1e-9);
  if (distance(last) < -APART) return { word: "bad", text: `It got worse: ${change}.` };
  if (distance(last) <= APART) return { word: "look", text: `Not to be told yet: ${change}, within the noise.` };
  let end = 2 * WINDOW;
  while (end < points.length && distance(moments(points.slice(end - WINDOW, end))) <= APART) end++;
  return { word: "good", text: `Yes, from about step ${points[end - 1][0]} on: ${change}.` };
}

function moments(points) {
  const values = points.map(([, value]) => value);
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  const variance = values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (values.length - 1);
  return { mean, error: Math.sqrt(variance / values.length) };
}
