// Device: who has it, how full it is, what decodes now; the last minutes as lines, the last minute as a strip.
import { h, keep, put, setAttributes, svg, write } from "./element.js";
import { bytes, duration, number, percent, time } from "./format.js";
import { now, state } from "./live.js";
import { chart } from "./plot.js";
import { table } from "./table.js";

const SECONDS = 60;
const MINUTES = [15, 60, 1440, 10080];
const LINES = { running: ["Rows that decode", number], waiting: ["Requests that wait", number], kv_bytes: ["KV memory", bytes], resident: ["Memory of the process", bytes], cpu: ["CPU (1 is one core)", number] };

export async function open(context) {
  const parts = {
    figures: h("dl.figures"),
    strip: svg("svg.strip", { viewBox: `0 0 ${SECONDS} 10`, preserveAspectRatio: "none", role: "img", "aria-label": "Work of the device over the last minute" }),
    legend: h("p.legend"),
    charts: h("div.grid"),
  };
  const minutes = h("select", { "aria-label": "How far back" }, MINUTES.map((count) => h("option", { value: count, selected: String(count) === context.params.minutes }, duration(60 * count))));
  const rows = table({
    label: "Requests that decode",
    columns: [
      { title: "Request", text: (row) => row.id, class: "mono" },
      { title: "For", text: (row) => row.traffic, sort: (row) => row.traffic },
      { title: "Model", text: (row) => row.model, sort: (row) => row.model },
      { title: "Prompt", text: (row) => number(row.prompt_tokens), sort: (row) => row.prompt_tokens, isNumber: true },
      { title: "Tokens", text: (row) => `${number(row.sampled)} of ${number(row.max_tokens)}`, sort: (row) => row.sampled, isNumber: true },
      { title: "Since", text: (row) => duration(row.seconds), sort: (row) => row.seconds, isNumber: true },
    ],
    key: (row) => row.id,
    empty: "Nothing decodes now.",
  });
  put(
    context.root,
    h("div.halves", h("section.card", h("h2", "Now"), parts.figures), h("section.card", h("h2", "The last minute"), parts.strip, parts.legend)),
    h("div.bar", h("label", "back to", minutes)),
    parts.charts,
    h("section.card", h("h2", "What decodes"), rows.element),
  );
  const charts = new Map();
  context.atEnd(() => charts.forEach((one) => one.end()));
  const readCharts = async () => showCharts(parts, charts, await context.get("/v1/device", { minutes: minutes.value }), parts);
  const readRows = async () => {
    const [timeline, decoding] = await Promise.all([context.get("/v1/device/timeline", { seconds: SECONDS }), context.get("/v1/device/rows")]);
    showStrip(parts, timeline);
    rows.show(decoding.rows);
  };
  const quietly = (act) => () => act().catch(() => {});
  minutes.addEventListener("change", quietly(readCharts));
  context.every(10, quietly(readCharts));
  context.every(2, quietly(readRows));
  await Promise.all([readCharts(), readRows()]);
  return { keys: { j: () => rows.move(1), k: () => rows.move(-1) } };
}

function showCharts(parts, charts, answer) {
  const { memory = {}, seconds = {}, shares = {} } = answer;
  const total = Object.values(seconds).reduce((sum, value) => sum + value, 0);
  const figures = [
    ["Device", answer.name],
    ...Object.entries(seconds).map(([work, value]) => [`Time for ${work}`, duration(value) + (total ? `, ${percent(value / total, 0)}` : "")]),
    ...Object.entries(shares).filter(([, value]) => value !== null).map(([name, value]) => [name.replaceAll("_", " "), number(value)]),
    ...Object.entries(memory).filter(([, value]) => value !== null).map(([name, value]) => [`Memory, ${name}`, bytes(value)]),
    ["KV memory", state.pulse.kv_limit ? `${bytes(state.pulse.kv_bytes)} of ${bytes(state.pulse.kv_limit)}` : "–"],
  ].filter(([, text]) => text !== undefined && text !== null);
  keep(parts.figures, figures, ([label]) => label, ([label, text]) => h("div.figure", h("dt", label), h("dd", h("span.value", text))), (row, [, text]) => write(row.querySelector(".value"), text));
  const names = Object.keys(answer.columns).filter((name) => answer.columns[name].some((value) => value !== null));
  const x = answer.times.map((at) => (at - answer.now) / 60);
  keep(
    parts.charts,
    names,
    (name) => name,
    (name) => {
      const [title, format] = LINES[name] ?? [name.replaceAll("/", ", "), number];
      charts.set(name, chart({ title, help: name, format, xFormat: (minute) => (minute > -0.02 ? "now" : `${number(-minute, 2)} min ago`) }));
      return charts.get(name).element;
    },
    () => {},
  );
  for (const name of names) charts.get(name).draw({ lines: [{ name, colour: 0, x, y: answer.columns[name].map((value) => value ?? NaN) }] });
}

/** One bar a span of work; its place and length are seconds. */
function showStrip({ strip, legend }, { work, spans }) {
  const used = work.map((name, index) => [name, spans.filter(([kind]) => kind === index).reduce((sum, [, , length]) => sum + length, 0), index]).filter(([, seconds]) => seconds > 0);
  put(strip, spans.map(([kind, start, length]) => svg("rect", { class: `c${kind % 8}`, x: (SECONDS + start).toFixed(3), y: 0, width: Math.max(0.02, length).toFixed(3), height: 10 })));
  const shares = used.map(([name, seconds]) => `${name} ${percent(seconds / SECONDS, 0)}`).join(", ");
  setAttributes(strip, { "aria-label": `Work of the device over the last minute: ${shares || "idle"}` });
  put(legend, used.length ? used.map(([name, seconds, index]) => h("span", h("i", { class: `c${index % 8}` }), `${name} ${percent(seconds / SECONDS, 0)}`)) : "idle");
  legend.append(" ", time(now()));
}
