// One group: a problem with its completions side by side, their rewards, and every token with its numbers.
import { h, put } from "./element.js";
import { cut, number, plural } from "./format.js";
import { isLive, state } from "./live.js";
import { go, link, setParams } from "./router.js";
import { stepBar } from "./samples.js";
import { colourChoice, numbersOf, toggle, tokenView } from "./tokens.js";

const NAMES = ["logprob", "entropy", "difference", "advantage", "clipped", "version"];

/** Show group `place` of view.step. Returns {turnTable}. */
export async function openGroup(view, place) {
  const { context } = view;
  const group = await context.get(context.runPath(`/rollouts/${view.step}/${place}`), { policy: state.policy });
  const chosen = NAMES.includes(view.params.colour) ? view.params.colour : "logprob";
  const made = group.completions.map((one) => completionCard(one, chosen));
  const colour = (name) => {
    setParams({ colour: name });
    view.params = { ...view.params, colour: name };
    for (const { tokens } of made) tokens.colour(name);
  };
  const table = toggle("as table", false, (isTable) => made.forEach(({ tokens }) => tokens.asTable(isTable)));
  const elsewhere = h("div");
  const button = (text, by, label) => h("button", { type: "button", "aria-label": label, disabled: !isThere(group, place + by), onclick: () => view.move(by) }, text);
  view.move = (by) => isThere(group, place + by) && go("samples", [view.step, place + by], { colour: view.params.colour });
  const neighbours = h("span", "group ", button("‹", -1, "Earlier group (p)"), ` ${place} of ${group.groups} `, button("›", 1, "Later group (n)"));
  const tools = [h("a", { href: link("samples", [view.step]) }, "all of the step"), table, inChat(group)];
  const other = h("button", { type: "button", onclick: () => showElsewhere(view, group, elsewhere) }, "same problem at other steps");
  put(context.root, stepBar(view, neighbours), h("div.bar", tools, other), elsewhere, problem(group), h("div.bar", colourChoice(NAMES, chosen, colour)), h("div.side", { tabindex: 0, role: "region", "aria-label": "Completions side by side" }, made.map(({ element }) => element), group.faulty.map(faultCard)));
  return { turnTable: () => table.click() };
}

const isThere = (group, place) => place >= 0 && place < group.groups;

function problem(group) {
  const message = ({ role, content }) => h("div", h("strong.muted", `${role} `), h("span.text", cut(content, 20000)));
  const none = h("p.muted", "The prompt came from a client and is not kept.");
  const facts = (group.environment ? `environment ${group.environment} · ` : "") + `problem ${group.problem_id}`;
  const answer = group.answer ? h("p", h("strong.muted", "answer "), h("span.text", cut(group.answer, 4000))) : null;
  return h("section.card", { "aria-label": "Problem" }, group.messages.length ? group.messages.map(message) : none, answer, h("p.muted", facts));
}

/** A completion with rewards, advantage and tokens. */
function completionCard(one, colour) {
  const tokens = tokenView(numbersOf(one), `Tokens of completion ${one.index}`, colour);
  const advantage = one.advantage === null ? "not trained on" : `advantage ${one.advantage > 0 ? "+" : ""}${number(one.advantage, 3)}`;
  const versions = [...new Set(one.versions.map(({ version }) => version))].join(", ");
  const ends = { stop: "ended by itself", length: "cut at the limit", abort: "aborted" }[one.finish_reason] ?? one.finish_reason;
  const parts = Object.entries(one.parts).map(([name, value]) => h("span.pill", cut(name, 60), " ", number(value, 3)));
  const element = h(
    "article.card",
    { "aria-label": `Completion ${one.index}` },
    h("h3", `${one.index} · reward ${number(one.reward, 3)} · ${advantage}`),
    h("p.pills", parts),
    h("p.muted", `${plural(one.tokens.ids.length, "token")}, ${ends} · version ${versions} · temperature ${number(one.temperature, 3)}`),
    tokens.element,
  );
  return { element, tokens };
}

function faultCard(fault) {
  return h("article.card", { "aria-label": "Completion without a reward" }, h("h3.bad", fault.kind), h("p.text", cut(fault.detail, 4000)), h("pre.text", cut(fault.text, 20000)));
}

function inChat(group) {
  const version = group.completions[0]?.versions[0]?.version;
  const last = group.messages.at(-1);
  if (!isLive() || !last || state.session?.serves === false) return null;
  const params = { prompt: last.content.slice(0, 4000), system: group.messages[0].role === "system" ? group.messages[0].content.slice(0, 2000) : "", left: version ? `${state.policy || state.session.trains[0]}@${version}` : "" };
  return h("a", { href: link("chat", [], params) }, "open in chat");
}

async function showElsewhere(view, group, element) {
  const { steps } = await view.context.get(view.context.runPath("/rollouts"), { policy: state.policy, problem: group.problem_id });
  const others = steps.filter((row) => row.step !== view.step);
  const item = (row) => h("li", h("a", { href: link("samples", [row.step, row.group]) }, `step ${row.step}`), ` mean reward ${number(row.problem_reward, 3)}`);
  put(element, others.length ? h("ul", others.map(item)) : h("p.muted", "No other step that is kept has it."));
}
