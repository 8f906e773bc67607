// A chart: plotly draws axes, lines and bands; what comes live is drawn on top until the axes have to grow.
// plotly gets numbers alone, never a text of data: it reads a part of HTML in texts.
import { h, keep, put, setAttributes, svg, write } from "./element.js";
import { number } from "./format.js";

const HEIGHT = 220;
const MARGIN = { l: 52, r: 10, t: 8, b: 26 };
const HEADROOM = 0.05;
const MIN_HEADROOM = 20;
const NEAR = 4; // pixels
const NUM_ROWS = 40;

let plotly = null;
const waiting = [];
const colours = new Map();

/** Resolves to plotly, which is loaded on first use, after the numbers are on screen. */
function loaded() {
  plotly ??= import("./plotly.min.js").then(() => globalThis.Plotly);
  return plotly;
}

/** Draw one chart a frame, so that no frame is long. */
function soon(draw) {
  if (waiting.includes(draw)) return;
  waiting.push(draw);
  if (waiting.length === 1) requestAnimationFrame(next);
}

async function next() {
  await waiting[0]?.();
  waiting.shift();
  if (waiting.length) requestAnimationFrame(next);
}

/** Return the colour that a variable of style.css has in the present theme. */
function colour(name) {
  if (!colours.has(name)) {
    const probe = h("span");
    probe.style.setProperty("color", `var(--${name})`);
    document.body.append(probe);
    colours.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return colours.get(name);
}

for (const [target, kind] of [[document, "themechange"], [matchMedia("(prefers-color-scheme: dark)"), "change"]]) {
  target.addEventListener(kind, () => colours.clear());
}

/** Return a chart {element, draw(data), live(make), cursor(x), table(isShown), end()}.

data: {lines: [{name, colour, x, y, low, high, faint}], points: [{name, colour, x, y, low, high}], markers: [{x, text}],
range: [from, to] or null, isLog}. Arrays have one length; NaN is a gap. on: {zoom(range or null), move(x), pick(x)}. */
export function chart({ title, help, format = number, xFormat = number, on = {} }) {
  const readout = h("span.readout");
  const place = h("div.plot");
  const tail = svg("path");
  const overlay = svg("svg.overlay", { "aria-hidden": "true" }, tail);
  const line = h("div.cursor", { hidden: true });
  const frame = h("div.frame", { tabindex: 0, role: "img", "aria-label": title }, place, overlay, line);
  const rows = h("div.scroll", { hidden: true, tabindex: 0, role: "region", "aria-label": `${title}, table` });
  const element = h("figure.chart.card", h("figcaption", h("strong", { title: help }, title), readout), frame, rows);
  let data = null;
  let axes = null; // {x: [from, to], y: [from, to], width} of what plotly drew
  let stale = null; // makes the newest data of a chart out of sight
  let drawnTo = 0;
  let isVisible = false;
  let at = null;

  function renew() {
    data = stale?.() ?? data;
    stale = null;
  }

  async function redraw() {
    renew();
    if (!isVisible || !data || !element.isConnected || frame.hidden) return;
    const library = await loaded();
    const now = data;
    axes = axesOf(now, frame.clientWidth);
    drawnTo = Math.max(0, (now.lines[0]?.x.length ?? 0) - 1);
    await library.react(place, traces(now), layout(axes, now), { displayModeBar: false, doubleClick: false, responsive: false });
    if (!place.isWatched) {
      place.isWatched = true;
      place.on("plotly_relayout", (change) => "xaxis.range[0]" in change && on.zoom?.([change["xaxis.range[0]"], change["xaxis.range[1]"]]));
      place.on("plotly_doubleclick", () => on.zoom?.(null));
    }
    drawTail();
    showCursor(at);
  }

  const toX = (x) => MARGIN.l + ((x - axes.x[0]) / (axes.x[1] - axes.x[0])) * (axes.width - MARGIN.l - MARGIN.r);
  const toY = (y) => {
    const value = data.isLog ? Math.log10(y) : y;
    return HEIGHT - MARGIN.b - ((value - axes.y[0]) / (axes.y[1] - axes.y[0])) * (HEIGHT - MARGIN.t - MARGIN.b);
  };

  function drawTail() {
    const first = data.lines.find((one) => !one.faint);
    let path = "";
    if (axes && first && !data.range) {
      let isDown = false;
      for (let index = Math.min(drawnTo, first.x.length - 1); index < first.x.length; index++) {
        const y = toY(first.y[index]);
        if (Number.isFinite(y)) path += `${isDown ? "L" : "M"}${toX(first.x[index]).toFixed(1)} ${y.toFixed(1)}`;
        isDown = Number.isFinite(y);
      }
    }
    setAttributes(tail, { d: path, class: `c${first?.colour ?? 0}` });
  }

  /** Whether the newest numbers lie outside of the axes. */
  function hasLeft() {
    if (!axes || data.range) return !axes;
    return data.lines.some(({ x, y }) => {
      const last = y.at(-1);
      const value = data.isLog ? Math.log10(last) : last;
      return x.at(-1) > axes.x[1] || value < axes.y[0] || value > axes.y[1];
    });
  }

  function showCursor(x) {
    at = x;
    line.hidden = x === null || !axes || x < axes.x[0] || x > axes.x[1];
    if (!line.hidden) line.style.setProperty("left", `${toX(x)}px`);
    write(readout, data ? readoutAt(data, x, format, xFormat, axes ? ((axes.x[1] - axes.x[0]) / axes.width) * NEAR : 0) : "");
  }

  const xAt = (event) => {
    const inside = event.clientX - frame.getBoundingClientRect().left - MARGIN.l;
    return axes.x[0] + (inside / (axes.width - MARGIN.l - MARGIN.r)) * (axes.x[1] - axes.x[0]);
  };
  let pressedAt = 0;
  frame.addEventListener("pointermove", (event) => axes && (on.move ?? showCursor)(nearest(data, xAt(event))));
  frame.addEventListener("pointerleave", () => (on.move ?? showCursor)(null));
  frame.addEventListener("pointerdown", (event) => (pressedAt = event.clientX), true);
  frame.addEventListener("click", (event) => Math.abs(event.clientX - pressedAt) < NEAR && axes && on.pick?.(nearest(data, xAt(event))), true);
  frame.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Enter" && at !== null) on.pick?.(at);
    if (!by || !data?.lines.length) return;
    event.preventDefault();
    const { x } = data.lines[0];
    const index = at === null ? x.length - 1 : Math.max(0, Math.min(x.length - 1, indexAt(x, at) + by));
    (on.move ?? showCursor)(x[index]);
  });

  const watcher = new IntersectionObserver(([entry]) => {
    isVisible = entry.isIntersecting;
    if (isVisible && data) describe();
    if (isVisible) soon(redraw);
    else if (axes) release();
  }, { rootMargin: "200px" });
  watcher.observe(element);
  const sizes = new ResizeObserver(() => axes && frame.clientWidth !== axes.width && soon(redraw));
  sizes.observe(frame);
  const recolour = () => soon(redraw);
  document.addEventListener("themechange", recolour);

  /** Charts out of sight hold no memory of plotly's. */
  function release() {
    axes = null;
    globalThis.Plotly?.purge(place);
    place.isWatched = false;
    setAttributes(tail, { d: "" });
  }

  function describe() {
    setAttributes(frame, { "aria-label": sentence(title, data, format, xFormat) });
    if (!rows.hidden && isVisible) put(rows, tableOf(data, format, xFormat));
  }

  return {
    element,
    draw(next) {
      data = next;
      stale = null;
      describe();
      showCursor(at);
      soon(redraw);
    },
    live(make) {
      stale = make;
      if (!isVisible) return;
      renew();
      showCursor(at);
      if (hasLeft()) soon(redraw);
      else drawTail();
    },
    cursor: showCursor,
    table(isShown) {
      rows.hidden = !isShown;
      frame.hidden = isShown;
      if (data) describe();
      if (!isShown) soon(redraw);
    },
    end() {
      watcher.disconnect();
      sizes.disconnect();
      document.removeEventListener("themechange", recolour);
      release();
    },
  };
}

function traces({ lines, points }) {
  const all = [];
  for (const { x, y, low, high, colour: index, faint } of lines) {
    const own = colour(`c${index}`);
    if (low) {
      const band = { x, mode: "lines", line: { width: 0 }, hoverinfo: "skip", connectgaps: false };
      all.push({ ...band, y: low }, { ...band, y: high, fill: "tonexty", fillcolor: own.replace("rgb(", "rgba(").replace(")", ", 0.18)") });
    }
    all.push({ x, y, mode: x.length < 60 ? "lines+markers" : "lines", line: { color: own, width: faint || x.length > 500 ? 1 : 1.8 }, marker: { size: 4 }, opacity: faint ? 0.35 : 1, hoverinfo: "none" });
  }
  for (const { x, y, low, high, colour: index } of points ?? []) {
    const own = colour(`c${index}`);
    const error = low ? { type: "data", symmetric: false, array: high.map((end, at) => end - y[at]), arrayminus: low.map((end, at) => y[at] - end), color: own, thickness: 1.2, width: 3 } : undefined;
    all.push({ x, y, mode: "lines+markers", line: { color: own, width: 1 }, marker: { size: 7, symbol: "square", color: own }, error_y: error, hoverinfo: "none" });
  }
  return all;
}

function layout(axes, { isLog, markers }) {
  const shared = { gridcolor: colour("line"), zerolinecolor: colour("line"), linecolor: colour("soft"), color: colour("soft"), fixedrange: true };
  const mark = (one) => ({ type: "line", x0: one.x, x1: one.x, y0: 0, y1: 1, yref: "paper", line: { color: colour("c1"), width: 1, dash: "dot" } });
  return {
    width: axes.width, height: HEIGHT, margin: MARGIN, showlegend: false, dragmode: "zoom", hovermode: false,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { size: 11, color: colour("soft") },
    xaxis: { ...shared, fixedrange: false, range: axes.x, tickformat: "~s", nticks: 6 },
    yaxis: { ...shared, range: axes.y, type: isLog ? "log" : "linear", nticks: 6 },
    shapes: (markers ?? []).filter(({ x }) => x >= axes.x[0] && x <= axes.x[1]).map(mark),
  };
}

/** Ranges with some room for what comes, so that axes change rarely. */
function axesOf({ lines, points, range, isLog }, width) {
  const all = [...lines, ...(points ?? [])];
  const xs = extent(all.map(({ x }) => x));
  const room = range ? 0 : Math.max(HEADROOM * (xs[1] - xs[0]), lines.some(({ isSteps }) => isSteps) ? MIN_HEADROOM : 0);
  const x = range ?? [xs[0], xs[1] + (room || 1e-9)];
  const inside = (values, at) => (range ? values.filter((_, index) => at[index] >= range[0] && at[index] <= range[1]) : values);
  let [low, high] = extent(all.flatMap((one) => [one.y, one.low, one.high].filter(Boolean).map((values) => inside(values, one.x))), isLog);
  if (isLog) [low, high] = [Math.log10(low), Math.log10(high)];
  const edge = 0.06 * (high - low) || Math.abs(high) * 0.1 || 0.5;
  return { x, y: [low - edge, high + edge], width };
}

function extent(arrays, isPositive = false) {
  let [low, high] = [Infinity, -Infinity];
  for (const values of arrays)
    for (const value of values)
      if (Number.isFinite(value) && (!isPositive || value > 0)) {
        if (value < low) low = value;
        if (value > high) high = value;
      }
  return low <= high ? [low, high] : isPositive ? [0.1, 1] : [0, 1];
}

function indexAt(xs, x) {
  let [low, high] = [0, xs.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
}

function nearest(data, x) {
  const xs = data?.lines[0]?.x ?? data?.points?.[0]?.x;
  return xs?.length ? xs[indexAt(xs, x)] : null;
}

/** The numbers under the cursor, or the newest. */
function readoutAt(data, x, format, xFormat, near) {
  const all = [...data.lines.filter((one) => !one.faint), ...(data.points ?? [])].filter((one) => one.x.length);
  const texts = all.map((one) => {
    const index = x === null ? one.x.length - 1 : indexAt(one.x, x);
    const band = one.low && one.low[index] !== one.high[index] ? ` (${format(one.low[index])} to ${format(one.high[index])})` : "";
    return `${all.length > 1 ? one.name + " " : ""}${format((one.raw ?? one.y)[index])}${band}`;
  });
  if (x === null) return texts.join(" · ");
  const marks = (data.markers ?? []).filter((one) => Math.abs(one.x - x) <= near).map((one) => one.text);
  return [`${xFormat(x)}: ${texts.join(" · ")}`, ...marks.slice(0, 2)].join(" · ");
}

function sentence(title, data, format, xFormat) {
  const one = data.lines.find((line) => !line.faint) ?? data.points?.[0];
  if (!one?.x.length) return `${title}: no numbers`;
  const values = one.y.filter((value) => !Number.isNaN(value));
  const [low, high] = extent([values]);
  return `${title}, ${xFormat(one.x[0])} to ${xFormat(one.x.at(-1))}, first ${format(values[0])}, newest ${format(values.at(-1))}, lowest ${format(low)}, highest ${format(high)}. Arrow keys move the cursor.`;
}

function tableOf(data, format, xFormat) {
  const all = [...data.lines.filter((one) => !one.faint), ...(data.points ?? [])].filter((one) => one.x.length);
  const parts = all.map((one) => {
    const every = Math.ceil(one.x.length / NUM_ROWS);
    const shown = [...one.x.keys()].filter((index) => index % every === 0 || index === one.x.length - 1);
    const cells = (index) => [xFormat(one.x[index]), format(one.y[index]), one.low ? format(one.low[index]) : "", one.high ? format(one.high[index]) : ""];
    return [all.length > 1 ? h("caption", one.name) : null, h("thead", h("tr", ["at", "value", "lowest", "highest"].map((text) => h("th", { scope: "col", class: "number" }, text)))), h("tbody", shown.reverse().map((index) => h("tr", cells(index).map((text) => h("td.number", text)))))];
  });
  return parts.map((part) => h("table", part));
}

/** Return a legend {element, show([{name, colour}])}. */
export function legend() {
  const element = h("div.legend");
  return { element, show: (rows) => keep(element, rows, (row) => row.colour, (row) => h("span", h("i", { class: `c${row.colour}` }), row.name), (one, row) => one.lastChild.data !== row.name && put(one, h("i", { class: `c${row.colour}` }), row.name)) };
}
