// Overview: is it learning, is it sound, is it fast; what happened; what it writes.
import { h, keep, put, write } from "./element.js";
import { bytes, clock, cut, duration, number, percent, plural } from "./format.js";
import { happeningList } from "./happenings.js";
import { isLive, now, on, state } from "./live.js";
import { columnOf, intervalOf, metricOf, newest, verdictOf } from "./metrics.js";
import { link } from "./router.js";
import { spark } from "./spark.js";

const LEARNING = ["reward/mean", "heldout/accuracy", "update/loss", "update/accuracy", "groups/signal", "completion/length_mean", "completion/truncated_fraction"];
const SOUND = ["update/kl_to_behaviour", "update/kl_to_base", "update/entropy", "update/gradient_norm", "update/clip_fraction", "parity/mean_abs", "offpolicy/lag_mean"];
const FAST = ["rollout/tokens_per_second", "serving/tokens_per_second", "seconds/total"];
const VISIT = "parallm-visit";
const AWAY = 600;

export async function open(context) {
  const parts = {
    since: h("p.note", { hidden: true }),
    verdict: h("p.verdict"),
    learning: h("dl.figures"),
    sound: h("dl.figures"),
    signs: h("p"),
    fast: h("dl.figures"),
    device: h("dl.figures"),
    group: h("section.card", { hidden: true }),
    happenings: happeningList(8),
    evaluations: [],
  };
  const column = (title, ...inside) => h("section.card", h("h2", title), inside);
  put(
    context.root,
    parts.since,
    h("div.columns", column("Is it learning?", parts.verdict, parts.learning), column("Is it sound?", parts.signs, parts.sound), column("Is it fast?", parts.fast, parts.device)),
    parts.group,
    h("section.card", h("h2", "What happened"), parts.happenings.element, h("a", { href: link("log") }, "all of it")),
  );
  const draw = () => show(parts);
  for (const kind of ["history", "step", "status"]) context.on(kind, draw);
  context.on("pulse", () => showDevice(parts));
  for (const kind of ["happening", "happenings"]) context.on(kind, () => parts.happenings.show(state.happenings));
  const more = () => readMore(context, parts);
  context.on("evaluation", more);
  context.on("history", more);
  context.every(20, more);
  draw();
  showDevice(parts);
  parts.happenings.show(state.happenings);
  showSince(parts, context);
  performance.mark("numbers");
  void more();
}

async function readMore(context, parts) {
  if (state.run === null) return;
  const query = { policy: state.policy };
  const [evaluations, rollouts] = await Promise.all([
    context.get(context.runPath("/evaluations"), query).catch(() => ({ data: [] })),
    context.get(context.runPath("/rollouts"), query).catch(() => ({ steps: [] })),
  ]);
  parts.evaluations = evaluations.data;
  show(parts);
  const last = rollouts.steps.at(-1);
  if (!last) return;
  const groups = await context.get(context.runPath(`/rollouts/${last.step}`), { ...query, sort: "spread" }).catch(() => ({ groups: [] }));
  showGroup(parts, last.step, groups.groups[0]);
}

function show(parts) {
  const { history } = state;
  const verdict = history ? verdictOf(history, parts.evaluations) : { word: "", text: state.run === null ? "Nothing is trained here; this process serves." : "No step has ended yet." };
  write(parts.verdict, verdict.text).className = `verdict ${verdict.word}`;
  figures(parts.learning, LEARNING, parts.evaluations);
  figures(parts.sound, SOUND, []);
  figures(parts.fast, FAST, []);
  showSigns(parts);
}

/** Show a row for each metric that the run has: label, newest number, small line. */
function figures(list, names, evaluations) {
  const { history } = state;
  const isThere = (name) => evaluations.some((row) => typeof row[name] === "number") || (history && columnOf(history, name));
  // the height of a policy's loss says nothing
  const there = names.filter((name) => isThere(name) && !(name === "update/loss" && isThere("reward/mean")));
  keep(list, there, (name) => name, makeFigure, () => {});
  for (const row of list.children) updateFigure(row, evaluations);
}

function makeFigure(name) {
  const metric = metricOf(name);
  const line = spark();
  const value = h("span.value");
  const row = h("div.figure", h("dt", h("a", { href: link("curves", [], { find: name }), title: metric.help }, metric.label)), h("dd", value, line.element));
  Object.assign(row, { metric, line, value });
  return row;
}

function updateFigure({ metric, line, value }, evaluations) {
  const measured = evaluations.filter((row) => typeof row[metric.name] === "number");
  if (measured.length) {
    const last = measured.at(-1);
    const interval = intervalOf(last, metric.name);
    write(value, metric.format(last[metric.name]) + (interval ? ` (${interval.map((end) => metric.format(end)).join(" to ")})` : "") + ` at step ${last.step}`);
    return line.draw(measured.map((row) => row[metric.name]));
  }
  const column = columnOf(state.history, metric.name);
  write(value, metric.format(newest(column)));
  line.draw(column.last);
}

/** The guard's own words of the last steps; the page has no rules of its own. */
function showSigns(parts) {
  const recent = state.happenings.filter((row) => ["sign", "fault", "guard_rollback"].includes(row.kind) && (state.history?.last ?? 0) - (row.step ?? 0) < 100);
  const skipped = state.history?.value("guard/skipped") ?? 0;
  if (!state.history) return write(parts.signs, "");
  write(parts.signs, recent.length ? `Look: ${cut(recent.at(-1).text || recent.at(-1).kind, 300)}` : "The guard has seen no sign in the last 100 steps" + (skipped ? `; ${plural(skipped, "step")} skipped in all` : "") + ".");
  parts.signs.className = recent.length ? "look" : "good";
}

const PULSE = [
  ["Rows", ({ running, rows }) => (running === undefined ? null : number(running) + (rows?.max ? ` of ${number(rows.max)}` : ""))],
  ["Waiting", ({ waiting }) => (waiting === undefined ? null : number(waiting))],
  ["KV memory", ({ kv_bytes: used, kv_limit: limit }) => (used === undefined ? null : bytes(used) + (limit ? `, ${percent(used / limit, 0)} of ${bytes(limit)}` : ""))],
  ["Device", ({ device }) => shares(device)],
];

function shares(device) {
  const total = Object.values(device ?? {}).reduce((sum, value) => sum + value, 0);
  if (!total) return device ? "idle" : null;
  return Object.entries(device).filter(([, value]) => value / total >= 0.005).map(([work, value]) => `${work} ${percent(value / total, 0)}`).join(", ");
}

function showDevice(parts) {
  const rows = PULSE.map(([label, text]) => [label, text(state.pulse)]).filter(([, text]) => text !== null);
  keep(parts.device, rows, ([label]) => label, ([label, text]) => h("div.figure", h("dt", label), h("dd", h("span.value", text))), (row, [, text]) => write(row.querySelector(".value"), text));
}

function showGroup(parts, step, group) {
  parts.group.hidden = !group;
  if (!group) return;
  const rewards = group.rewards.map((reward) => h("span.pill", { class: reward > 0 ? "good" : "" }, number(reward, 3)));
  put(
    parts.group,
    h("h2", `What it writes: step ${step}`),
    h("p.text", cut(group.prompt, 200)),
    h("p.bar", "Rewards ", rewards, h("a", { href: link("samples", [step, group.group]) }, "open these completions"), h("a", { href: link("samples", [step]) }, "all of the step")),
  );
}

/** Say what came since the last visit, where that was some time ago. */
function showSince(parts, context) {
  const place = `${VISIT}-${state.session.run ?? ""}-${state.policy}`;
  const before = JSON.parse(localStorage.getItem(place) ?? "null");
  const step = state.history?.last ?? 0;
  if (isLive() && before && now() - before.time > AWAY && step) {
    const happened = state.happenings.filter((row) => row.time > before.time);
    const count = (kind) => happened.filter((row) => row.kind === kind).length;
    write(parts.since, `Since you looked at ${clock(before.time)}, ${duration(now() - before.time)} ago: ${plural(Math.max(0, step - before.step), "step")}, ${plural(count("evaluated"), "evaluation")}, ${plural(count("guard_rollback"), "roll-back")} by the guard, ${plural(count("fault"), "fault")}.`);
    parts.since.hidden = false;
  }
  const note = () => localStorage.setItem(place, JSON.stringify({ time: now(), step: state.history?.last ?? 0 }));
  if (isLive() && state.run) context.atEnd(note);
  if (isLive() && state.run) context.every(30, note);
}
