// Log: what happened, faults with their culprits, lines of the log, checkpoints.
import { h, put } from "./element.js";
import { bytes, cut, number, time } from "./format.js";
import { happeningList } from "./happenings.js";
import { state } from "./live.js";
import { link, setParams } from "./router.js";
import { table } from "./table.js";

const LEVELS = ["DEBUG", "INFO", "WARNING", "ERROR"];
const CLASSES = { WARNING: "look", ERROR: "bad", CRITICAL: "bad" };
const KEPT = 500;

export async function open(context) {
  if (state.run === null) return void put(context.root, h("p.muted", "Nothing is trained here. The lines of this server's log are on its terminal."));
  const happened = happeningList(200);
  const lines = lineList();
  const faults = h("div");
  const saved = table({
    label: "Checkpoints",
    columns: [
      { title: "Name", text: (row) => row.name },
      { title: "Step", text: (row) => number(row.step), sort: (row) => row.step, isNumber: true },
      { title: "Saved", cell: (row) => time(row.time), sort: (row) => row.time },
      { title: "Size", text: (row) => bytes(row.bytes), sort: (row) => row.bytes, isNumber: true },
    ],
    key: (row) => row.name,
    empty: "No checkpoint has been saved.",
  });
  const level = h("select", { "aria-label": "Lowest level" }, LEVELS.map((name) => h("option", { value: name, selected: name === (context.params.level ?? "INFO") }, name)));
  const find = h("input", { type: "search", "aria-label": "Find in the log", placeholder: "find", value: context.params.find ?? "" });
  put(
    context.root,
    h("div.halves", h("section.card", h("h2", "What happened"), happened.element), h("section.card", h("h2", "Faults"), faults)),
    h("section.card", h("h2", "Log"), h("div.bar", h("label", "from level ", level), find), lines.element),
    h("section.card", h("h2", "Checkpoints"), saved.element),
  );
  const query = { policy: state.policy };
  const readLines = async () => {
    setParams({ level: level.value, find: find.value });
    const { data } = await context.get(context.runPath("/log"), { level: level.value, search: find.value, limit: KEPT });
    lines.show(data);
  };
  const read = async () => {
    const [found, checkpoints] = await Promise.all([context.get(context.runPath("/faults"), query), context.get(context.runPath("/checkpoints"), query), readLines()]);
    put(faults, found.data.length ? found.data.toReversed().map(faultItem) : h("p.muted", "No step had a fault."));
    saved.show(checkpoints.data.toReversed());
  };
  const safely = (act) => () => act().catch((error) => error.name === "AbortError" || lines.element.prepend(context.errorBox(error)));
  level.addEventListener("change", safely(readLines));
  find.addEventListener("change", safely(readLines));
  const showHappened = () => happened.show(state.happenings);
  context.on("log", (row) => matches(row, level.value, find.value) && lines.add(row));
  for (const kind of ["happening", "happenings"]) context.on(kind, showHappened);
  context.on("happening", ({ kind }) => ["saved", "fault"].includes(kind) && safely(read)());
  showHappened();
  await read();
}

function matches({ level, text }, least, find) {
  return Math.max(0, LEVELS.indexOf(level)) >= LEVELS.indexOf(least) && text.toLowerCase().includes(find.toLowerCase());
}

/** Lines with the newest below, followed while the end is in sight. */
function lineList() {
  const element = h("div.log", { tabindex: 0, role: "log", "aria-label": "Lines of the log", "aria-live": "off" });
  const line = (row) => h("div.line", h("span.muted", time(row.time)), " ", h("span", { class: CLASSES[row.level] ?? "muted" }, row.level), " ", h("span.muted", row.logger.replace("parallm.", "")), " ", h("span.text", cut(row.text, 4000)));
  const toEnd = () => (element.scrollTop = element.scrollHeight);
  return {
    element,
    show(rows) {
      put(element, rows.length ? rows.map(line) : h("p.muted", "No line."));
      toEnd();
    },
    add(row) {
      const isAtEnd = element.scrollHeight - element.scrollTop - element.clientHeight < 40;
      element.append(line(row));
      while (element.children.length > KEPT) element.firstChild.remove();
      if (isAtEnd) toEnd();
    },
  };
}

function faultItem(fault) {
  const culprit = (one) =>
    h("li", h("a", { href: link("samples", [fault.step, one.group]) }, `problem ${cut(one.problem_id, 80)}, group ${one.group}, completion ${one.index}`), `: ${cut(one.reason, 300)}`);
  return h("details", { open: true }, h("summary", h("strong.bad", fault.kind), ` at step ${fault.step} `, fault.time ? h("span.muted", time(fault.time)) : null), h("p.text", cut(fault.text, 2000)), h("ul", (fault.culprits ?? []).map(culprit)));
}
