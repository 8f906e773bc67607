// Curves: any metric over steps or time, smoothed, zoomed, of one or several runs.
import { board, isMoving, sourceOf } from "./board.js";
import { h, put } from "./element.js";
import { state } from "./live.js";
import { legend } from "./plot.js";
import { setParams } from "./router.js";

export async function open(context) {
  const { params } = context;
  if (state.run === null) return void put(context.root, h("p.muted", "Nothing is trained here, so there are no curves. Device shows what is served."));
  const x = h("select", { "aria-label": "Horizontal axis" }, ["step", "time"].map((name) => h("option", { value: name, selected: name === params.x }, name)));
  const smooth = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: params.smooth ?? 0.6, "aria-label": "Smoothing" });
  const log = h("input", { type: "checkbox", checked: params.log === "1" });
  const isTable = h("input", { type: "checkbox", checked: params.table === "1" });
  const find = h("input", { type: "search", "aria-label": "Find a metric", placeholder: "find, such as kl", value: params.find ?? "" });
  const whole = h("button", { type: "button", onclick: () => charts.reset() }, "Whole range");
  const names = legend();
  const charts = board(context);
  put(
    context.root,
    h("div.bar", h("label", "over", x), h("label", "smooth", smooth), h("label", log, "log"), h("label", isTable, "tables"), find, whole),
    h("p.muted", "Drag across a chart to zoom in, double click for the whole range. A click opens the samples of a step. Dotted lines: acts and signs."),
    names.element,
    charts.element,
  );
  context.atEnd(charts.end);
  const others = (params.compare ?? "").split(",").filter(Boolean);
  const sources = await Promise.all([sourceOf(context, null, 0), ...others.map((run, index) => sourceOf(context, run, index + 1))]);
  names.show(sources.length > 1 ? sources : []);
  const options = () => ({ x: x.value, smooth: Number(smooth.value), isLog: log.checked, find: find.value, isTable: isTable.checked });
  const show = () => charts.show(sources, options());
  const change = () => {
    setParams({ x: x.value === "step" ? null : x.value, smooth: smooth.value, log: log.checked ? 1 : null, table: isTable.checked ? 1 : null, find: find.value || null });
    show();
  };
  for (const field of [x, smooth, log, isTable]) field.addEventListener("change", change);
  find.addEventListener("input", change);
  context.on("step", () => isMoving(sources) && charts.step());
  context.on("evaluation", async () => {
    sources[0] = { ...(await sourceOf(context, null, 0)) };
    show();
  });
  context.on("history", (history) => {
    sources[0].history = history;
    show();
  });
  show();
  return {
    keys: {
      0: () => charts.reset(),
      t() {
        isTable.checked = !isTable.checked;
        change();
      },
    },
  };
}
