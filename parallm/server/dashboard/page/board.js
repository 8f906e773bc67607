// A board of charts over one or several runs: sections, a shared cursor and range, smoothing, tables.
import { h, keep, put } from "./element.js";
import { clock, cut, number } from "./format.js";
import { readHistory, readSteps } from "./history.js";
import { wordOf } from "./happenings.js";
import { isLive, state } from "./live.js";
import { columnOf, intervalOf, metricOf, sectionsOf } from "./metrics.js";
import { chart } from "./plot.js";
import { go } from "./router.js";

const MIN_SMOOTHED = 50;
const MAX_STEPS = 2000;
const MARKED = ["promoted", "rolled_back", "guard_rollback", "fault", "sign", "resumed_run", "paused", "resumed", "shares", "split", "unsplit", "stopped", "stepped"];
const FORMATS = { step: (x) => `step ${number(Math.round(x))}`, time: (x) => `${number(x, 3)} h` };

/** Return a source of a run: what the page has of the one that is looked at, or what is read of another. */
export async function sourceOf(context, run, colour) {
  const id = run ?? state.run;
  const policy = run ? undefined : state.policy;
  const path = `/v1/runs/${encodeURIComponent(id)}`;
  const [history, evaluations, happenings] = await Promise.all([
    run ? readHistory(run, policy, { signal: context.signal }) : state.history,
    context.get(`${path}/evaluations`, { policy }).then((answer) => answer.data).catch(() => []),
    run ? [] : state.happenings,
  ]);
  const letter = String.fromCharCode(65 + colour);
  const name = `${letter} ${(id === "current" ? state.session.run : id).replace("~", " ")}`;
  return { id, policy, history, evaluations, happenings, colour, letter, name, detail: null };
}

/** Return {element, show(sources, options), step(), end()}; options: {x, smooth, isLog, find, isTable, only}. */
export function board(context) {
  const element = h("div.board");
  const charts = new Map();
  let sources = [];
  let options = { x: "step", smooth: 0 };
  let range = null;
  let at = null;
  let frame = 0;

  const on = {
    zoom: (next) => void zoom(next),
    move(x) {
      at = x;
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        const start = performance.now();
        for (const one of charts.values()) one.cursor(at);
        performance.measure("cursor", { start });
      });
    },
    pick(x) {
      if (x !== null && options.x === "step") go("samples", [Math.round(x)]);
    },
  };

  async function zoom(next) {
    range = next;
    for (const source of sources) source.detail = null;
    drawAll();
    const [from, to] = next ?? [0, Infinity];
    if (options.x !== "step" || to - from > MAX_STEPS) return;
    await Promise.all(sources.filter(({ history }) => history?.bucket > 1).map(async (source) => {
      const names = [...charts.keys()].filter((name) => source.history.column(name));
      const { steps, columns } = await readSteps(source.id, source.policy, Math.max(0, Math.floor(from) - 1), Math.ceil(to), names, { signal: context.signal });
      source.detail = { steps, columns };
    })).catch(() => {});
    if (range === next) drawAll();
  }

  function drawAll() {
    for (const [name, one] of charts) one.draw(dataOf(name, sources, options, range));
  }

  function make(name) {
    const { label, help, format } = metricOf(name);
    const made = chart({ title: label, help: help || label, format, xFormat: FORMATS[options.x], on });
    charts.set(name, made);
    made.table(Boolean(options.isTable));
    return made.element;
  }

  function forget(name) {
    charts.get(name).end();
    charts.delete(name);
  }

  function section([title, names]) {
    const isRest = !/^[A-Z]/.test(title);
    const grid = h("div.grid");
    const made = isRest ? h("details", h("summary", h("h2", cut(title, 80)), ` ${names.length}`), grid) : h("section", h("h2", title), grid);
    const fill = () => {
      const shown = isRest && !made.open && !options.find ? [] : names;
      for (const name of [...charts.keys()].filter((one) => charts.get(one).element.parentNode === grid && !shown.includes(one))) forget(name);
      keep(grid, shown, (name) => name, make, () => {});
      for (const name of shown) charts.get(name).draw(dataOf(name, sources, options, range));
    };
    if (isRest) {
      made.open = Boolean(options.find);
      made.addEventListener("toggle", fill);
    }
    made.fill = (next) => {
      names = next[1];
      fill();
    };
    return made;
  }

  return {
    element,
    show(nextSources, nextOptions) {
      if (nextOptions.x !== options.x) {
        range = null;
        for (const name of [...charts.keys()]) forget(name);
        element.replaceChildren();
      }
      sources = nextSources;
      options = nextOptions;
      const names = new Set(sources.flatMap(({ history }) => history?.names ?? []));
      const wanted = (options.find ?? "").toLowerCase();
      const matches = (name) => `${name} ${metricOf(name).label}`.toLowerCase().includes(wanted);
      const all = sectionsOf(names, sources.flatMap(({ evaluations }) => evaluations)).map(([title, list]) => [title, list.filter(matches)]);
      const shown = all.filter(([title, list]) => list.length && (!options.only || options.only.includes(title)));
      if (!shown.length) {
        for (const name of [...charts.keys()]) forget(name);
        return void put(element, h("p.muted", names.size ? "No metric has this name." : "No step has ended yet."));
      }
      keep(element, shown, ([title]) => title, section, () => {});
      for (const [index, made] of [...element.children].entries()) made.fill(shown[index]);
      for (const name of [...charts.keys()]) if (!charts.get(name).element.isConnected) forget(name);
      for (const one of charts.values()) one.table(Boolean(options.isTable));
    },
    step() {
      const start = performance.now();
      for (const [name, one] of charts) one.live(() => dataOf(name, sources, options, range));
      performance.measure("step", { start });
    },
    reset: () => on.zoom(null),
    end() {
      for (const name of [...charts.keys()]) forget(name);
    },
  };
}

function dataOf(name, sources, options, range) {
  const lines = [];
  const points = [];
  for (const source of sources) {
    const rows = source.evaluations.filter((row) => typeof row[name] === "number");
    if (rows.length) points.push(pointsOf(rows, name, source, options.x));
    else lines.push(...linesOf(name, source, options));
  }
  const own = sources[0];
  const marks = (own?.happenings ?? []).filter((row) => MARKED.includes(row.kind) && row.step !== null);
  const markers = marks.slice(-60).map((row) => ({ x: xOf(row.step, row.time, own, options.x), text: `${wordOf(row.kind)} ${clock(row.time)}` }));
  return { lines, points, markers, range, isLog: options.isLog };
}

function linesOf(name, source, { x: kind, smooth }) {
  const { history, detail, colour } = source;
  if (!history) return [];
  const shared = { name: source.letter, colour, isSteps: kind === "step" };
  if (detail?.columns[name]) {
    const y = detail.columns[name].map((value) => value ?? NaN);
    return smoothed({ ...shared, x: detail.steps, y }, smooth);
  }
  const column = columnOf(history, name);
  if (!column) return [];
  const x = kind === "step" ? history.starts : xsOf(history);
  const band = history.bucket > 1 ? { low: column.low, high: column.high } : {};
  return smoothed({ ...shared, x, y: column.last, ...band }, smooth);
}

/** The line, and before it the raw one where it is smoothed: a debiased exponential mean. */
function smoothed(line, weight) {
  const steps = line.x.length;
  if (!weight || steps < MIN_SMOOTHED) return [line];
  let [sum, total] = [0, 0];
  const y = line.y.map((value) => {
    if (Number.isNaN(value)) return NaN;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
  const { low, high, ...rest } = line;
  return low ? [{ ...line, y, raw: line.y }] : [{ ...rest, faint: true }, { ...rest, y, raw: line.y }];
}

/** Hours since the first step. */
function xsOf(history) {
  const times = history.column("time")?.last ?? [];
  const first = times.find((time) => !Number.isNaN(time)) ?? 0;
  return history.starts.map((_, index) => (times[index] - first) / 3600);
}

function xOf(step, time, { history }, kind) {
  if (kind === "step" || !history) return step;
  const first = history.column("time")?.last.find((value) => !Number.isNaN(value));
  if (time && first) return (time - first) / 3600;
  const xs = xsOf(history);
  return xs[Math.max(0, Math.min(xs.length - 1, Math.floor((step - history.starts[0]) / history.bucket)))] ?? 0;
}

function pointsOf(rows, name, source, kind) {
  const ends = rows.map((row) => intervalOf(row, name));
  const band = ends.every(Boolean) ? { low: ends.map(([low]) => low), high: ends.map(([, high]) => high) } : {};
  return { name: source.letter, colour: source.colour, x: rows.map((row) => xOf(row.step, row.time, source, kind)), y: rows.map((row) => row[name]), ...band };
}

/** Whether steps of the first source still come. */
export const isMoving = (sources) => sources[0]?.id === "current" && isLive();
