// Samples: the steps whose completions are kept, a step's groups, and one group with its tokens (group.js).
import { h, put, write } from "./element.js";
import { clock, cut, number, percent, plural } from "./format.js";
import { openGroup } from "./group.js";
import { state } from "./live.js";
import { go, setParams } from "./router.js";
import { table } from "./table.js";

const SORTS = [["spread", "widest spread of rewards"], ["index", "as sampled"], ["reward", "highest reward"], ["length", "longest"]];
const EVERY = 5;

export async function open(context) {
  const view = { context, steps: [], step: null, isNewest: true, group: null, move: () => {} };
  const keys = {
    j: () => view.list?.move(1),
    k: () => view.list?.move(-1),
    n: () => view.move(1),
    p: () => view.move(-1),
    N: () => stepBy(view, 1),
    P: () => stepBy(view, -1),
    t: () => view.group?.turnTable(),
    Escape: () => view.group && go("samples", [view.step]),
  };
  if (state.run === null) {
    put(context.root, h("p.muted", "Nothing is trained here; the chat asks what is served."));
    return null;
  }
  const change = (place) => show(view, place).catch((error) => context.fail(error, () => change(place)));
  await show(view, context);
  context.every(EVERY, () => refresh(view).catch(() => {}));
  return { change, keys };
}

async function show(view, { parts, params }) {
  view.params = params;
  await readSteps(view);
  view.isNewest = !parts[0];
  view.step = parts[0] ? Number(parts[0]) : (view.steps.at(-1)?.step ?? null);
  view.group = view.list = null;
  if (view.step === null) return void put(view.context.root, h("p.muted", "No step has ended yet."), warnings(view));
  if (parts[1] !== undefined) view.group = await openGroup(view, Number(parts[1]));
  else await openStep(view);
}

async function readSteps(view) {
  Object.assign(view, await view.context.get(view.context.runPath("/rollouts"), { policy: state.policy }));
}

/** Read the list of steps again; on the newest step, offer a newer one. */
async function refresh(view) {
  if (!view.context.isLive()) return;
  const before = view.steps.at(-1)?.step;
  await readSteps(view);
  const newest = view.steps.at(-1)?.step;
  if (newest === before || newest === undefined) return;
  if (view.step === null) return void (await show(view, { parts: [], params: view.params }));
  if (view.newer) {
    view.newer.hidden = newest === view.step;
    write(view.newer, `step ${newest} has come`);
  }
}

function stepBy(view, by) {
  const next = neighbour(view, by);
  if (next) go("samples", [next.step], view.params);
}

const neighbour = ({ steps, step }, by) => (by > 0 ? steps.find((row) => row.step > step) : steps.findLast((row) => row.step < step));

/** Return the bar with the step, its neighbours and what is known of it. */
export function stepBar(view, ...more) {
  const row = view.steps.find(({ step }) => step === view.step);
  const button = (text, by, label) => h("button", { type: "button", "aria-label": label, disabled: !neighbour(view, by), onclick: () => stepBy(view, by) }, text);
  const options = view.steps.toReversed().map(({ step }) => h("option", { value: step, selected: step === view.step }, step));
  const choice = h("select", { "aria-label": "Step", onchange: (event) => go("samples", [event.target.value], view.params) }, options);
  view.newer = h("button.primary", { type: "button", hidden: true, onclick: () => go("samples", [view.steps.at(-1).step], view.params) });
  const known = row ? `${clock(row.time)} · mean reward ${number(row.reward_mean, 3)} · ${row.with_signal} of ${plural(row.groups, "group")} with signal (${percent(row.with_signal / row.groups, 0)})` : "";
  return h("div.bar", h("span", "step ", button("‹", -1, "Earlier step (P)"), " ", choice, " ", button("›", 1, "Later step (N)")), h("span.muted", known), view.newer, more);
}

function warnings(view) {
  const lines = [];
  if (view.dropped) lines.push(`${plural(view.dropped, "step")} of this run could not be kept: writing took too long (metrics.rollouts=some keeps less).`);
  for (const { step, reason } of view.damaged ?? []) lines.push(`The file of step ${step} cannot be read: ${reason}.`);
  return lines.map((line) => h("p.note", line));
}

async function openStep(view) {
  const { context, params } = view;
  const sort = h("select", { "aria-label": "Order" }, SORTS.map(([name, title]) => h("option", { value: name, selected: name === (params.sort ?? "spread") }, title)));
  const find = h("input", { type: "search", placeholder: "find", "aria-label": "Find in problems and completions", value: params.find ?? "" });
  const signal = h("input", { type: "checkbox", checked: params.signal === "true" });
  const environment = h("select", { "aria-label": "Environment", hidden: true });
  const list = (view.list = table({
    label: `Groups of step ${view.step}`,
    columns: [
      { title: "#", text: (row) => String(row.group), isNumber: true },
      { title: "problem", cell: (row) => h("span.text", cut(row.prompt, 140)) },
      { title: "answer", cell: (row) => h("span.text", cut(row.answer, 40)) },
      { title: "rewards", cell: rewards },
      { title: "advantages", text: (row) => range(row.advantages, "none") },
      { title: "tokens", text: (row) => `${range(row.lengths)}${row.finish_reasons.includes("length") ? ", cut" : ""}` },
      { title: "version", text: (row) => row.versions.join(", ") },
    ],
    key: (row) => row.group,
    onopen: (row) => go("samples", [view.step, row.group]),
    empty: "No group is like that.",
  }));
  const more = h("p.muted");
  put(context.root, warnings(view), stepBar(view, h("label", "order ", sort), environment, find, h("label", signal, "only with signal")), list.element, more, h("p.muted", "A row opens a problem with its completions, token by token."));
  const read = async () => {
    setParams({ sort: sort.value, find: find.value, signal: signal.checked || null, environment: environment.value });
    view.params = { ...view.params, sort: sort.value, find: find.value };
    const query = { policy: state.policy, sort: sort.value, search: find.value, signal: signal.checked || null, environment: environment.value };
    const found = await context.get(context.runPath(`/rollouts/${view.step}`), query);
    if (!environment.options.length && found.environments.length) {
      put(environment, h("option", { value: "" }, "all environments"), found.environments.map((name) => h("option", { value: name, selected: name === params.environment }, name)));
      environment.hidden = false;
    }
    list.show(found.groups);
    write(more, found.more ? `${number(found.more)} more groups; find or order to see them.` : "");
  };
  const safely = () => read().catch((error) => error.name === "AbortError" || list.element.before(context.errorBox(error)));
  for (const field of [sort, find, signal, environment]) field.addEventListener("change", safely);
  await read();
}

/** Rewards of a group, one pill each, and what could not be scored. */
export function rewards(row) {
  const best = Math.max(...row.rewards.map((reward) => reward ?? -Infinity));
  const pill = (reward) => h("span.pill", { class: reward === best && row.rewards.some((one) => one !== best) ? "good" : "" }, number(reward, 3));
  return h("span.pills", row.rewards.map(pill), row.faulty.map(({ kind }) => h("span.pill.bad", kind)));
}

function range(values, none = "–") {
  const numbers = values.filter((value) => value !== null);
  if (!numbers.length) return none;
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  return low === high ? number(low, 3) : `${number(low, 3)} to ${number(high, 3)}`;
}

