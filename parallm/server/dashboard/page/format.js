// Numbers, times and sizes as a person reads them.
import { h } from "./element.js";

/** Return a number with four significant digits, "–" for one that is missing. */
export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number" || !Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size >= 1e7 || (size > 0 && size < 1e-3)) return value.toExponential(2).replace("e+", "e");
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 6 });
}

export function percent(value, digits = 1) {
  return value === null || value === undefined || Number.isNaN(value) ? "–" : (100 * value).toFixed(digits) + "%";
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; Math.abs(value) >= 1000 && unit < 4; unit++) value /= 1000;
  return `${number(value, 3)} ${units[unit]}`;
}

/** Return seconds as "0.4 s", "12 s", "3 min 4 s", "3 h 10 min", "2 d 4 h". */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 59.5) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (seconds < 3600) return `${minutes} min` + (minutes < 10 && seconds % 60 >= 1 ? ` ${Math.floor(seconds % 60)} s` : "");
  if (seconds < 86400) return `${Math.floor(minutes / 60)} h` + (minutes % 60 ? ` ${minutes % 60} min` : "");
  return `${Math.floor(seconds / 86400)} d` + (seconds % 86400 >= 3600 ? ` ${Math.floor((seconds % 86400) / 3600)} h` : "");
}

/** Return a local time, with the day where it is not today's. */
export function clock(unix) {
  if (!unix) return "–";
  const date = new Date(unix * 1000);
  const time = date.toLocaleTimeString("en-GB");
  if (date.toDateString() === new Date().toDateString()) return time;
  return date.toLocaleDateString("en-GB", { day: "numeric", month: "short", year: "numeric" }) + " " + time.slice(0, 5);
}

/** Return an element with the local time, whose title has the time in UTC. */
export function time(unix) {
  if (!unix) return h("span", "–");
  const utc = new Date(unix * 1000).toISOString();
  return h("time", { datetime: utc, title: utc.replace("T", " ").replace(/\..*/, " UTC") }, clock(unix));
}

/** Return the text cut to size characters, with the number of those left out. */
export function cut(text, size = 200) {
  const string = String(text ?? "");
  if (string.length <= size) return string;
  return `${string.slice(0, size)} ... (${(string.length - size).toLocaleString("en")} more characters)`;
}

export function plural(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}
