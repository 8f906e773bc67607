// Single keys. None changes anything on the server; none acts in a field; they can be switched off in Settings.
import { h } from "./element.js";
import { show } from "./dialogs.js";
import { go } from "./router.js";
import { VIEWS } from "./views.js";

const OFF = "parallm-keys-off";
let viewKeys = {};
let isAfterG = false;

export const areOn = () => localStorage.getItem(OFF) === null;

export function turn(isOn) {
  if (isOn) localStorage.removeItem(OFF);
  else localStorage.setItem(OFF, "1");
}

/** Keys of the view on screen, by name of the key: {j: function}. */
export function setViewKeys(keys) {
  viewKeys = keys ?? {};
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !areOn()) return;
  if (event.target.closest?.("input, select, textarea, dialog, [contenteditable]")) return;
  const view = isAfterG && VIEWS.find((one) => one.key === event.key);
  isAfterG = event.key === "g" && !isAfterG;
  if (isAfterG) return;
  if (view) go(view.name);
  else if (Object.hasOwn(viewKeys, event.key)) viewKeys[event.key](event);
  else if (event.key === "/") document.querySelector("main [type=search]")?.focus();
  else if (event.key === "?") void help();
  else return;
  event.preventDefault();
});

const KEYS = [
  ["g, then a letter", VIEWS.map((view) => `${view.key} ${view.title}`).join(", ")],
  ["/", "find"],
  ["n p, N P", "next and previous sample, step"],
  ["j k, Enter, x", "next and previous row, open it, mark it"],
  ["t", "table instead of charts"],
  ["0", "whole range of the charts"],
  ["arrows", "move the cursor of a focused chart"],
  ["Ctrl+Enter", "send a chat"],
  ["Esc", "close, or back"],
];

export function help() {
  const rows = KEYS.map(([key, text]) => h("tr", h("th", { scope: "row" }, h("kbd", key)), h("td", text)));
  return show("Keys", h("div", h("table.plain", h("tbody", rows)), h("p.muted", "No single key changes anything on the server.")), [["", "Close"]]);
}
