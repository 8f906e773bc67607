// The tokens of one completion: coloured by a number, one under the cursor, all of them as a table.
import { h, put, setAttributes, write } from "./element.js";
import { number } from "./format.js";

const LEVELS = 8;
const MAX_ROWS = 2000;
const MORE = ["entropy", "difference", "advantage", "other"];
const is = (value) => value !== null && value !== undefined;

/** Ways to colour; share is that of the full colour, below zero for the other hue. */
export const COLOURS = {
  logprob: { title: "log-prob", legend: "dark: unlikely, 0 to -6 nats", share: (value) => -value / 6 },
  entropy: { title: "entropy", legend: "dark: uncertain, 0 to 3 nats", share: (value) => value / 3 },
  difference: { title: "learner - sampler", legend: "-0.5 to 0.5 nats, lined below zero", share: (value) => value / 0.5 },
  advantage: { title: "advantage", legend: "-2 to 2, lined below zero", share: (value) => value / 2 },
  clipped: { title: "clipped", legend: "tokens whose gradient was bounded", share: (value) => Number(value) },
  version: { title: "version", legend: "every other version is dark", share: (value, index) => (index % 2) / 2 },
  other: { title: "other - this version", legend: "-2 to 2 nats, lined where the other finds it less likely", share: (value) => value / 2 },
};

/** Return one object of numbers for each token of a completion of /rollouts/{step}/{group}. */
export function numbersOf({ tokens, advantage, versions }) {
  const clipped = new Set(tokens.clipped);
  return tokens.texts.map((text, place) => {
    const logprob = tokens.logprobs[place];
    const span = versions.findIndex(({ start, end }) => start <= place && place < end);
    const isTrained = tokens.trained.some(([begin, end]) => begin <= place && place < end);
    return {
      text,
      id: tokens.ids[place],
      logprob: isTrained ? logprob : null,
      entropy: tokens.entropies?.[place] ?? null,
      difference: !tokens.learned || !isTrained ? null : tokens.learner_logprobs ? tokens.learner_logprobs[place] - logprob : 0,
      advantage: isTrained ? (tokens.advantages?.[place] ?? advantage) : null,
      clipped: clipped.has(place),
      isTrained,
      version: versions[span]?.version ?? null,
      span,
    };
  });
}

/** Describe a token in one line. */
export function describe(one, place, count) {
  const parts = [`token ${place + 1} of ${count}: ${JSON.stringify(one.text)}`, `id ${one.id ?? "–"}`];
  if (is(one.logprob)) parts.push(`p ${number(Math.exp(one.logprob), 3)} (${number(one.logprob, 3)})`);
  for (const name of MORE) if (is(one[name])) parts.push(`${COLOURS[name].title} ${number(one[name], 3)}`);
  if (one.clipped) parts.push("clipped");
  if (one.isTrained === false) parts.push("not trained: a reply");
  if (is(one.version)) parts.push(`version ${one.version}`);
  return parts.join(" · ");
}

/** Return {element, colour(name), asTable(isTable)} for tokens as numbersOf makes them. */
export function tokenView(tokens, label, colourName = "logprob") {
  const spans = joined(tokens);
  const made = spans.map((span, index) => h("span.token", { "data-place": String(index), class: classOf(span.tokens) }, span.text));
  const text = h("div.tokens.text", { tabindex: 0, role: "group", "aria-label": `${label}: arrows move` }, made);
  const info = h("p.info.muted", { role: "status" }, tokens.length ? "Point at a token, or use the arrow keys." : "No tokens.");
  const table = h("div", { hidden: true });
  let at = -1;

  function show(index) {
    if (index < 0 || index >= spans.length) return;
    made[at]?.classList.remove("at");
    at = index;
    made[at].classList.add("at");
    const { from, tokens: own } = spans[at];
    write(info, own.map((one, offset) => describe(one, from + offset, tokens.length)).join("\n"));
  }

  const point = (event) => show(Number(event.target.closest(".token")?.dataset.place ?? -1));
  text.addEventListener("mouseover", point);
  text.addEventListener("click", point);
  const moves = { ArrowRight: () => at + 1, ArrowLeft: () => Math.max(0, at - 1), Home: () => 0, End: () => spans.length - 1 };
  text.addEventListener("keydown", (event) => {
    if (!Object.hasOwn(moves, event.key) || event.ctrlKey || event.altKey || event.metaKey) return;
    show(moves[event.key]());
    made[at]?.scrollIntoView({ block: "nearest" });
    event.preventDefault();
  });

  function colour(name) {
    spans.forEach(({ tokens: own }, index) => {
      const last = own.at(-1);
      const value = last[name];
      const share = !is(value) ? 0 : COLOURS[name].share(value, last.span);
      const level = Math.round(Math.max(-1, Math.min(1, share)) * LEVELS);
      made[index].style.setProperty("--level", `${Math.abs(level) * 6}%`);
      made[index].classList.toggle("below", level < 0);
    });
  }

  colour(colourName);
  return {
    element: h("div", text, info, table),
    colour,
    asTable(isTable) {
      if (isTable && !table.firstChild) put(table, tableOf(tokens, label));
      table.hidden = !isTable;
      text.hidden = info.hidden = isTable;
    },
  };
}

/** Join tokens that end inside of a character with the one that ends it. */
function joined(tokens) {
  const spans = [];
  let open = null;
  tokens.forEach((one, place) => {
    open ??= { text: "", from: place, tokens: [] };
    open.tokens.push(one);
    open.text += one.text;
    if (one.text !== "" || place === tokens.length - 1) {
      spans.push(open);
      open = null;
    }
  });
  return spans;
}

function classOf(own) {
  const names = [];
  if (own.some((one) => one.clipped)) names.push("clipped");
  if (own.every((one) => one.isTrained === false)) names.push("reply");
  if (/^\n+$/.test(own.map((one) => one.text).join(""))) names.push("line");
  return names.join(" ");
}

function tableOf(tokens, label) {
  const columns = ["logprob", ...MORE].filter((name) => tokens.some((one) => is(one[name])));
  const head = ["#", "text", "id", ...columns.map((name) => COLOURS[name].title), "marks"];
  const rows = tokens.slice(0, MAX_ROWS).map((one, place) => {
    const marks = [one.clipped ? "clipped" : "", one.isTrained === false ? "not trained" : "", one.version ?? "" ? `version ${one.version}` : ""];
    const numbers = columns.map((name) => h("td.number", number(one[name], 4)));
    return h("tr", h("td.number", place + 1), h("td.text.mono", one.text), h("td.number", one.id ?? "–"), numbers, h("td", marks.filter(Boolean).join(", ")));
  });
  const more = tokens.length > MAX_ROWS ? h("p.muted", `${number(tokens.length - MAX_ROWS)} more tokens are not in this table.`) : null;
  const table = h("table", h("thead", h("tr", head.map((title) => h("th", { scope: "col" }, title)))), h("tbody", rows));
  return h("div.scroll", { tabindex: 0, role: "region", "aria-label": `Numbers of ${label}` }, table, more);
}

/** Return a select of colours with its legend; change(name) is called with each choice. */
export function colourChoice(names, chosen, change) {
  const legend = h("span.muted", COLOURS[chosen].legend);
  const pick = (event) => {
    write(legend, COLOURS[event.target.value].legend);
    change(event.target.value);
  };
  const options = names.map((name) => h("option", { value: name, selected: name === chosen }, COLOURS[name].title));
  return h("span.bar", h("label", "colour by ", h("select", { onchange: pick }, options)), legend);
}

/** Return a button that stays pressed; change(isPressed) is called with each turn. */
export function toggle(text, isPressed, change) {
  const button = h("button", { type: "button", "aria-pressed": String(isPressed) }, text);
  button.addEventListener("click", () => {
    const next = button.getAttribute("aria-pressed") !== "true";
    setAttributes(button, { "aria-pressed": String(next) });
    change(next);
  });
  return button;
}
