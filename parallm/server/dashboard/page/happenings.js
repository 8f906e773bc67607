// What happened, as a list: publications, evaluations, saved checkpoints, signs, faults, and what people did.
import { h, keep } from "./element.js";
import { cut, time } from "./format.js";
import { link } from "./router.js";

const WORDS = {
  started: "started", resumed_run: "resumed the run", published: "published", promoted: "promoted", rolled_back: "rolled back",
  aliased: "alias set", unaliased: "alias removed", split: "split", unsplit: "split ended", evaluated: "evaluated", saved: "saved",
  stepped: "one step", stopped: "stopped", shares: "shares changed", guard_rollback: "guard rolled back", caches_cleared: "caches cleared",
  serving_paused: "serving paused", serving_resumed: "serving resumed",
};
const KINDS = { fault: "bad", failed: "bad", guard_rollback: "bad", sign: "look", promoted: "good", evaluated: "good", finished: "good" };

/** Return the word for a kind of happening. */
export const wordOf = (kind) => WORDS[kind] ?? String(kind).replaceAll("_", " ");

/** Return {element, show(rows)}: the newest first. */
export function happeningList(limit) {
  const element = h("ul.happenings");
  return {
    element,
    show(rows) {
      const newest = rows.map((row, index) => ({ row, index })).slice(-limit).reverse();
      keep(element, newest, ({ row, index }) => `${row.time} ${row.kind} ${row.step} ${index}`, ({ row }) => item(row));
    },
  };
}

function item(row) {
  const step = row.step ? [" · ", h("a", { href: link("samples", [row.step]) }, `step ${row.step}`)] : null;
  const what = row.text || row.what || "";
  return h("li", h("span.muted", time(row.time)), " ", h("strong", { class: KINDS[row.kind] ?? "" }, wordOf(row.kind)), what ? " " : "", cut(what, 300), row.by ? h("span.muted", ` by ${row.by}`) : null, step);
}
