// Runs: all that lie beside this one, and a comparison of those that are marked: settings that differ, figures, curves.
import { board, sourceOf } from "./board.js";
import { h, put } from "./element.js";
import { cut, duration, number, plural, time } from "./format.js";
import { now, state } from "./live.js";
import { legend } from "./plot.js";
import { link, setParams } from "./router.js";
import { table } from "./table.js";

const MAX_COMPARED = 8;

export async function open(context) {
  const marked = new Set((context.params.compare ?? "").split(",").filter(Boolean));
  const comparison = h("section");
  const count = h("span.muted");
  let last = null; // where the next page of runs begins
  let rows = [];
  const compare = h("button.primary", { type: "button", onclick: () => void showComparison() }, "Compare");
  const more = h("button", { type: "button", hidden: true, onclick: () => void read() }, "More runs");
  const list = table({
    label: "Runs",
    columns: [
      { title: "Compare", cell: (run) => h("input", { type: "checkbox", checked: marked.has(run.id), "aria-label": `Compare ${cut(run.id, 80)}`, onchange: (event) => mark(run.id, event.target.checked) }) },
      { title: "Run", cell: (run) => h("a", { href: link("overview", [], { run: run.is_current ? null : run.id, policy: null }) }, cut(run.name, 60)), sort: (run) => run.name },
      { title: "Began", cell: (run) => time(run.began), sort: (run) => run.began },
      { title: "State", text: (run) => run.state, sort: (run) => run.state },
      { title: "Steps", text: (run) => number(run.step) + (run.total_steps ? ` of ${number(run.total_steps)}` : ""), sort: (run) => run.step, isNumber: true },
      { title: "Best held out", text: (run) => number(best(run)), sort: best, isNumber: true },
      { title: "Took", text: (run) => duration(took(run)), sort: took, isNumber: true },
    ],
    key: (run) => run.id,
    empty: "No run has been kept here.",
    sortBy: 2,
    descending: true,
  });
  put(context.root, h("div.bar", compare, count, more), h("div.card", list.element), comparison);

  function mark(id, isMarked) {
    if (isMarked) marked.add(id);
    else marked.delete(id);
    setParams({ compare: [...marked].join(",") || null });
    showCount();
  }

  function showCount() {
    const isWrong = marked.size < 2 || marked.size > MAX_COMPARED;
    compare.disabled = isWrong;
    put(count, isWrong ? `Mark two to ${MAX_COMPARED} runs to compare them; ${marked.size} marked.` : `${plural(marked.size, "run")} marked.`);
  }

  async function read() {
    const answer = await context.get("/v1/runs", { limit: 50, after: last });
    rows = [...rows, ...answer.data];
    state.runs = rows;
    last = answer.after;
    more.hidden = !last;
    list.show(rows);
  }

  let end = () => {};
  context.atEnd(() => end());

  async function showComparison() {
    end();
    const runs = [...marked].map((id) => rows.find((run) => run.id === id)).filter(Boolean);
    try {
      const [configs, sources] = await Promise.all([
        Promise.all(runs.map((run) => context.get(`/v1/runs/${encodeURIComponent(run.id)}/config`).then((one) => one.values).catch(() => ({})))),
        Promise.all(runs.map((run, index) => sourceOf(context, run.id, index))),
      ]);
      const charts = board(context);
      end = charts.end;
      const names = legend();
      put(comparison, h("h2", "What differs"), differences(runs, configs), h("h2", "Figures"), figures(runs), h("h2", "Curves"), names.element, charts.element);
      names.show(sources);
      charts.show(sources, { x: "step", smooth: 0.6, only: ["Learning", "Soundness"] });
    } catch (error) {
      if (error.name !== "AbortError") put(comparison, context.errorBox(error, showComparison));
    }
  }

  await read();
  showCount();
  if (marked.size > 1) await showComparison();
  return { keys: { j: () => list.move(1), k: () => list.move(-1), x: () => document.activeElement?.querySelector?.("input")?.click() } };
}

const best = (run) => run.figures?.accuracy_best ?? null;
const took = (run) => (run.began ? (run.ended ?? (run.is_current ? now() : run.began)) - run.began : null);
const shown = (value) => (value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));

function head(runs) {
  return h("thead", h("tr", h("th", { scope: "col" }, "Name"), runs.map((run, index) => h("th", { scope: "col" }, String.fromCharCode(65 + index), " ", cut(run.id.replace("~", " "), 60)))));
}

/** Settings that are not equal in all runs. */
function differences(runs, configs) {
  const names = [...new Set(configs.flatMap(Object.keys))].sort();
  const differing = names.filter((name) => new Set(configs.map((config) => shown(config[name]))).size > 1);
  if (!differing.length) return h("p", "Their settings are the same.");
  const row = (name) => h("tr", h("th.mono", { scope: "row" }, name), configs.map((config) => h("td.mono", cut(shown(config[name]), 200))));
  return h("div.scroll.card", { tabindex: 0, role: "region", "aria-label": "Settings that differ" }, h("table", head(runs), h("tbody", differing.map(row))));
}

function figures(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.figures ?? {})))].sort();
  const row = (name) => {
    const values = runs.map((run) => run.figures?.[name]);
    const least = Math.min(...values.filter((value) => typeof value === "number"));
    const cell = (value) => h("td.number", typeof value !== "number" ? shown(value) : number(value), typeof value === "number" && value !== least ? h("span.muted", ` (+${number(value - least)})`) : null);
    return h("tr", h("th", { scope: "row" }, name.replaceAll("_", " ")), values.map(cell));
  };
  const steps = h("tr", h("th", { scope: "row" }, "steps"), runs.map((run) => h("td.number", number(run.step))));
  return h("div.scroll.card", { tabindex: 0, role: "region", "aria-label": "Figures" }, h("table", head(runs), h("tbody", steps, names.map(row))));
}
