// Versions: which one serves whom, how good each was, and promote, pin, roll back, split, alias, export, unload.
import { act, button, reason } from "./actions.js";
import { askFor } from "./dialogs.js";
import { h, put, svg, write } from "./element.js";
import { number, percent } from "./format.js";
import { happeningList } from "./happenings.js";
import { state } from "./live.js";
import { table } from "./table.js";

const ROLE = "admin";
const SECONDS = 3;
const SHOWN = ["promoted", "rolled_back", "split", "unsplit", "aliased", "unaliased", "unloaded", "loaded", "uploaded", "guard_rollback"];
const WIDTH = 900;
const HEIGHT = 120;

export async function open(context) {
  const serving = h("p.big");
  const explained = h("p");
  const why = h("p.muted");
  const timeline = h("div");
  const list = happeningList(12);
  const acts = [];
  const known = { cards: [], splits: [], scores: new Map() };
  const add = (text, onclick, options) => {
    const made = button(text, ROLE, onclick, options);
    acts.push(made);
    return made.element;
  };
  const name = () => state.policy || state.session?.trains?.[0] || "policy";
  const split = () => known.splits.find((one) => one.name === name() && Object.keys(one.shares).length);
  const done = async (one) => {
    if (await act(one)) await refresh();
  };

  const rows = table({
    label: "Versions in memory",
    key: (card) => card.id,
    empty: "No version yet: the base answers.",
    columns: [
      { title: "Version", cell: (card) => h("strong", card.id), sort: (card) => card.version },
      { title: "Made at step", text: (card) => number(card.step), sort: (card) => card.step, isNumber: true },
      { title: "Held out", text: scoreText, sort: (card) => score(card)?.["heldout/accuracy"] ?? null, isNumber: true },
      { title: "Serves", text: servesText },
      { title: "Answers", text: (card) => number(counts(card).requests ?? 0), sort: (card) => counts(card).requests ?? 0, isNumber: true },
      { title: "Reward of clients", text: (card) => number(counts(card).mean_reward), isNumber: true },
      { title: "Also called", text: (card) => card.aliases.join(", ") || "–" },
      { title: "Change", cell: changes },
    ],
  });

  const score = (card) => known.scores.get(card.id);
  function scoreText(card) {
    const row = score(card);
    if (!row) return "–";
    if (typeof row["heldout/accuracy"] !== "number") return `loss ${number(row["heldout/loss"])}`;
    return `${percent(row["heldout/accuracy"])} (${percent(row["heldout/low"], 0)} to ${percent(row["heldout/high"], 0)})`;
  }
  function counts(card) {
    const found = known.splits.find((one) => one.name === card.name);
    return found?.versions?.[card.id] ?? {};
  }
  const means = (model, card) => model === card.id || (model === card.name && card.is_served) || card.aliases.some((one) => model === one || model === `${card.name}@${one}`);
  function servesText(card) {
    const found = known.splits.find((one) => one.name === card.name && Object.keys(one.shares).length);
    if (!found) return card.is_served ? `all of ${card.name}` : "–";
    const share = Object.entries(found.shares).reduce((sum, [model, part]) => sum + (means(model, card) ? part : 0), 0);
    return share ? `${percent(share, 0)} of ${card.name}` : "–";
  }

  const isTrained = (card) => state.session?.trains?.includes(card.name) && card.version === newest(card.name);
  const newest = (of) => Math.max(...known.cards.filter((card) => card.name === of).map((card) => card.version));
  // a table leaves a cell alone while it has the focus: the buttons of a version are made once and refreshed
  const changers = new Map();
  function changes(card) {
    const kept = changers.get(card.id) ?? changer(card);
    kept.card = card;
    for (const one of kept.buttons) one.refresh();
    return kept.element;
  }
  function changer(first) {
    const kept = { card: first };
    const of = (text, onclick, why = () => "", role = ROLE, kind = "") =>
      button(text, role, () => onclick(kept.card), { label: `${text} ${first.id}`, why: () => why(kept.card), kind });
    kept.buttons = [
      of("Promote", promote, (card) => (card.is_served ? "this version serves already" : "")),
      of("Pin", pin),
      of("Alias", alias),
      of("Export", save, undefined, "training"),
      of("Unload", unload, (card) => (isTrained(card) ? "training goes on from this version" : card.is_served ? "this version serves; promote another first" : ""), ROLE, "danger"),
    ];
    kept.element = h("span.row-acts", kept.buttons.map((one) => one.element));
    changers.set(first.id, kept);
    return kept;
  }

  const promote = (card) =>
    done({ title: `Promote ${card.id}`, method: "POST", path: "/v1/adapters/promote", body: { name: card.name, version: card.version }, danger: true,
      ask: `Requests for ${card.name} get ${card.id} from now on; those under way finish on theirs. ${afterwards(card)}`, done: () => `it serves ${card.name} now` });
  const afterwards = (card) =>
    isTrained(card) ? "It is the newest, so that training goes on to replace it with each version that it serves." : "It stays served while training goes on; newer versions wait until the newest is promoted.";
  const pin = (card) =>
    done({ title: `Pin ${card.id}`, method: "PUT", path: `/v1/splits/${encodeURIComponent(card.name)}`, body: { weights: { [card.id]: 1 } },
      ask: `All requests for ${card.name} get ${card.id}, whatever training serves, until the split is ended. The version stays in memory.`, done: () => `${card.name} is ${card.id} until the split ends` });
  const unload = (card) =>
    done({ title: `Unload ${card.id}`, method: "DELETE", path: `/v1/adapters/${encodeURIComponent(card.id)}`, danger: true,
      ask: `${card.id} leaves memory after the requests that run on it; requests for it are refused then. Checkpoints on the disk stay.` });
  async function alias(card) {
    const given = await askFor(`Alias of ${card.id}`, `${card.name}@ALIAS means this version until it is set again, and keeps it in memory.`, [{ name: "alias", label: "Alias", required: true, placeholder: "liked" }], "Set it");
    if (given?.alias) await done({ title: `Alias ${given.alias}`, method: "POST", path: "/v1/adapters/aliases", body: { alias: given.alias, name: card.name, version: card.version }, done: () => `means ${card.id}` });
  }
  function save(card) {
    const path = `/v1/adapters/${encodeURIComponent(card.id)}/archive`;
    return act({ title: `Export ${card.id}`, method: "GET", path, file: `${card.id}.zip`, send: () => context.download(path, {}, `${card.id}.zip`), done: () => `${card.id}.zip is saved` });
  }
  const rollBack = () =>
    done({ title: "Roll back", method: "POST", path: "/v1/adapters/rollback", body: { name: name() }, danger: true,
      ask: `Requests for ${name()} get the version below the one that serves now (${served()?.id ?? "the base"}), and it stays served while training goes on, until the newest is promoted.`,
      done: (answer) => `${answer.name} is ` + (answer.version ? `${answer.name}@${answer.version}` : "the base") + " now" });
  async function divide() {
    const now = split()?.shares ?? {};
    const own = known.cards.filter((card) => card.name === name()).sort((one, other) => other.version - one.version);
    const fields = [...own.map((card) => card.id), "base"].map((id) => ({ name: id, label: id, type: "number", min: 0, step: "any", value: now[id] ?? "", placeholder: "0" }));
    const given = await askFor(`Split ${name()}`, "Weights of the versions that answer requests for this name; they need not add up to 1.", fields, "Split");
    const weights = Object.fromEntries(Object.entries(given ?? {}).filter(([, value]) => Number(value) > 0).map(([id, value]) => [id, Number(value)]));
    if (Object.keys(weights).length) await done({ title: `Split ${name()}`, method: "PUT", path: `/v1/splits/${encodeURIComponent(name())}`, body: { weights } });
  }
  const unite = () => done({ title: `End the split of ${name()}`, method: "DELETE", path: `/v1/splits/${encodeURIComponent(name())}` });

  const served = () => known.cards.find((card) => card.name === name() && card.is_served);
  const buttons = h(
    "div.bar",
    add("Roll back", rollBack, { kind: "danger", why: () => (served() ? "" : "the base serves: there is nothing to go back from") }),
    add("Split ...", divide, { why: () => (known.cards.length ? "" : "there is no version yet") }),
    add("End split", unite, { why: () => (split() ? "" : "requests are not split") }),
  );

  function draw() {
    const now = served();
    const shares = split()?.shares;
    const parts = shares && Object.entries(shares).map(([model, share]) => `${model} ${percent(share, 0)}`);
    const isNewest = now && now.version === newest(name()) ? ", the newest" : "";
    write(serving, `Clients of ${name()} get ${shares ? parts.join(", ") : (now?.id ?? "the base") + isNewest}`);
    write(explained, explanation(now, shares));
    const missing = reason(ROLE);
    write(why, missing ? `Changing what is served ${missing}.` : "");
    for (const one of acts) one.refresh();
    const others = (card) => (card.name === name() ? 0 : 1);
    rows.show([...known.cards].sort((one, other) => others(one) - others(other) || other.version - one.version));
    known.cards.forEach(changes);
    put(timeline, chart(known.evaluations ?? [], name(), now?.version ?? null));
    list.show(state.happenings.filter((row) => SHOWN.includes(row.kind)));
  }

  function explanation(now, shares) {
    if (shares) return "A split decides who gets what until it is ended; a promotion changes only what the bare name means inside it.";
    if (!state.session?.trains?.includes(name())) return "Nothing trains this name here: it changes by promotions and loads alone.";
    if (now && now.version !== newest(name())) return `An older version than the newest (${name()}@${newest(name())}) serves, as was asked for or decided by trainer.publish_if. Promote the newest to follow training again.`;
    return "Training publishes a version with each step, which replaces the one that serves. Roll back or promote an older one to hold it; Pin keeps it whatever is promoted.";
  }

  async function refresh() {
    const [cards, splits, evaluations] = await Promise.all([
      context.get("/v1/adapters"),
      context.get("/v1/splits"),
      state.run ? context.get(context.runPath("/evaluations"), { policy: state.policy }).catch(() => ({ data: [] })) : { data: [] },
    ]);
    Object.assign(known, { cards: cards.data, splits: splits.data, evaluations: evaluations.data });
    known.scores = new Map(evaluations.data.map((row) => [`${name()}@${row["heldout/version"]}`, row]));
    draw();
  }

  put(
    context.root,
    h("section.card", serving, explained, buttons, why),
    h("section.card", h("h2", "How good each version was"), timeline),
    h("section.card", h("h2", "In memory"), rows.element),
    h("section.card", h("h2", "Who changed what"), list.element),
  );
  await refresh();
  const again = () => refresh().catch(() => {});
  context.every(SECONDS, again);
  for (const kind of ["session", "happenings", "happening", "history"]) context.on(kind, () => draw());
  context.on("evaluation", again);
  return { keys: { j: () => rows.move(1), k: () => rows.move(-1) } };
}

/** Return held-out accuracy over versions, with intervals, and the version that serves. */
function chart(rows, name, served) {
  const found = rows.filter((row) => typeof row["heldout/accuracy"] === "number").map((row) => [row["heldout/version"] ?? row.step, row]);
  if (!found.length) return h("p.muted", "No version was evaluated yet: Evaluate, above, does so after the present step.");
  const last = Math.max(1, served ?? 0, ...found.map(([version]) => version));
  const x = (version) => 30 + ((WIDTH - 60) * version) / last;
  const y = (value) => HEIGHT - 8 - (HEIGHT - 16) * value;
  const [best, top] = found.reduce((one, other) => (other[1]["heldout/accuracy"] > one[1]["heldout/accuracy"] ? other : one));
  const who = served === null ? "the base serves" : `the upright line is version ${served}, which serves`;
  const words = `Held-out accuracy of ${found.length} versions, highest ${percent(top["heldout/accuracy"])} at version ${best}; ${who}.`;
  const marks = found.map(([version, row]) => [
    svg("line", { x1: x(version), x2: x(version), y1: y(row["heldout/low"]), y2: y(row["heldout/high"]) }),
    svg("circle", { cx: x(version), cy: y(row["heldout/accuracy"]), r: 3, class: version === best ? "best" : "" }),
  ]);
  const path = found.map(([version, row], index) => `${index ? "L" : "M"}${x(version)} ${y(row["heldout/accuracy"])}`).join("");
  const at = served === null ? null : svg("line.served", { x1: x(served), x2: x(served), y1: 4, y2: HEIGHT - 4 });
  const picture = svg("svg.versions", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": words }, svg("path", { d: path }), marks, at);
  return h("div", picture, h("p.muted", words));
}
