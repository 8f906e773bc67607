// The numbers of a run by step: buckets of a power of two of steps, each with the lowest, highest and last value.
import { get } from "./server.js";

const POINTS = 1024;

export class History {
  constructor(answer) {
    this.epoch = answer.epoch;
    this.first = answer.first ?? null;
    this.last = answer.last ?? null;
    this.bucket = answer.bucket ?? 1;
    this.starts = [...(answer.starts ?? [])];
    this.columns = new Map();
    for (const [name, { low, high, last }] of Object.entries(answer.columns ?? {})) {
      this.columns.set(name, { low: floats(low), high: floats(high), last: floats(last) });
    }
    for (const [name, value] of Object.entries(answer.constant ?? {})) {
      const all = this.starts.map(() => value);
      this.columns.set(name, { low: [...all], high: [...all], last: all });
    }
  }

  /** Names of the numbers, in the order of the alphabet; the time of a step is none of them. */
  get names() {
    return [...this.columns.keys()].filter((name) => name !== "time" && name !== "step").sort();
  }

  get length() {
    return this.last === null ? 0 : this.last - this.first + 1;
  }

  /** Return {low, high, last} of a name, arrays as long as `starts` with NaN in gaps; null for one that is unknown. */
  column(name) {
    return this.columns.get(name) ?? null;
  }

  /** Return the newest number of a name, null without one. */
  value(name) {
    const last = this.columns.get(name)?.last ?? [];
    for (let index = last.length - 1; index >= 0; index--) if (!Number.isNaN(last[index])) return last[index];
    return null;
  }

  /** Take a step's row. Returns whether it is new: one that is known already changes nothing. */
  add(row) {
    if (this.last !== null && row.step <= this.last) return false;
    this.first ??= row.step;
    this.last = row.step;
    const start = row.step - ((row.step - 1) % this.bucket);
    const isNew = this.starts.at(-1) !== start;
    if (isNew) this.starts.push(start);
    for (const [name, value] of Object.entries(row)) {
      if (typeof value === "number" && !this.columns.has(name)) this.columns.set(name, gap(this.starts.length - (isNew ? 1 : 0)));
    }
    for (const [name, column] of this.columns) merge(column, typeof row[name] === "number" ? row[name] : NaN, isNew);
    if (this.starts.length > 2 * POINTS) this.#coarsen();
    return true;
  }

  #coarsen() {
    this.bucket *= 2;
    const starts = [];
    const homes = this.starts.map((start) => {
      const home = start - ((start - 1) % this.bucket);
      if (starts.at(-1) !== home) starts.push(home);
      return starts.length - 1;
    });
    for (const column of this.columns.values()) {
      const next = gap(starts.length);
      homes.forEach((home, index) => {
        next.low[home] = least(next.low[home], column.low[index]);
        next.high[home] = most(next.high[home], column.high[index]);
        if (!Number.isNaN(column.last[index])) next.last[home] = column.last[index];
      });
      Object.assign(column, next);
    }
    this.starts = starts;
  }
}

/** Return the history of a run ("current" or an id of /v1/runs), bounded however long it is. */
export async function readHistory(run, policy, options) {
  return new History(await get(`/v1/runs/${encodeURIComponent(run)}/history`, { policy, points: POINTS }, options));
}

/** Return {steps, columns} of single steps after since up to until, at most 2,000 of them. */
export async function readSteps(run, policy, since, until, names, options) {
  const path = `/v1/runs/${encodeURIComponent(run)}/history`;
  return get(path, { policy, since, until, names: names?.join(",") }, options);
}

function merge(column, value, isNew) {
  if (isNew) for (const numbers of [column.low, column.high, column.last]) numbers.push(value);
  else if (!Number.isNaN(value)) {
    const at = column.last.length - 1;
    column.low[at] = least(column.low[at], value);
    column.high[at] = most(column.high[at], value);
    column.last[at] = value;
  }
}

const floats = (numbers) => numbers.map((number) => number ?? NaN);
const least = (one, other) => (Number.isNaN(one) ? other : Number.isNaN(other) ? one : Math.min(one, other));
const most = (one, other) => (Number.isNaN(one) ? other : Number.isNaN(other) ? one : Math.max(one, other));

function gap(length) {
  return { low: Array(length).fill(NaN), high: Array(length).fill(NaN), last: Array(length).fill(NaN) };
}
