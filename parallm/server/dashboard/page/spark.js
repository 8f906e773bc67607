// A small line without axes, drawn at once: the numbers beside it are what is read.
import { setAttributes, svg } from "./element.js";

const WIDTH = 120;
const HEIGHT = 28;

/** Return {element, draw(values)}. NaN is a gap. */
export function spark() {
  const path = svg("path", { d: "" });
  const element = svg("svg.spark", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" }, path);
  return { element, draw: (values) => setAttributes(path, { d: pathOf(values) }) };
}

function pathOf(values) {
  const points = thinned(values);
  const there = points.filter((value) => !Number.isNaN(value));
  if (there.length < 2) return "";
  const low = Math.min(...there);
  const range = Math.max(...there) - low || 1;
  const step = WIDTH / (points.length - 1);
  let text = "";
  let isDown = false;
  points.forEach((value, index) => {
    if (Number.isNaN(value)) isDown = false;
    else {
      text += `${isDown ? "L" : "M"}${(index * step).toFixed(1)} ${(HEIGHT - 2 - ((value - low) / range) * (HEIGHT - 4)).toFixed(1)}`;
      isDown = true;
    }
  });
  return text;
}

/** Means over equal runs of values, at most as many as there are pixels. */
function thinned(values) {
  const size = Math.ceil(values.length / WIDTH);
  if (size <= 1) return values;
  const means = [];
  for (let start = 0; start < values.length; start += size) {
    const run = values.slice(start, start + size).filter((value) => !Number.isNaN(value));
    means.push(run.length ? run.reduce((sum, value) => sum + value, 0) / run.length : NaN);
  }
  return means;
}
