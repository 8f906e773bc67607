// Dialogs: a key, a confirmation, a form of a few fields, the help.
import { h } from "./element.js";
import { setKey } from "./server.js";

/** Show a dialog and resolve to the value of the button that closed it, "" for Escape. */
export function show(title, body, buttons) {
  const id = "dialog-title";
  const dialog = h("dialog", { "aria-labelledby": id }, h("h2", { id }, title), body);
  const close = (value) => (event) => {
    event?.preventDefault();
    const invalid = value && dialog.querySelector(":invalid");
    if (invalid) return invalid.reportValidity();
    dialog.close(value);
  };
  const made = buttons.map(([value, text, kind]) => h("button", { type: "button", class: kind ?? "", onclick: close(value) }, text));
  dialog.append(h("div.buttons", made));
  dialog.addEventListener("keydown", (event) => event.key === "Enter" && event.target.tagName === "INPUT" && close(buttons[0][0])(event));
  const before = document.activeElement;
  document.body.append(dialog);
  dialog.showModal();
  (dialog.querySelector("input, select, textarea") ?? made[0]).focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      if (before?.isConnected) before.focus();
      resolve(dialog.returnValue);
    });
  });
}

/** Ask before something that changes what others get. text says what will happen; resolves to true or false. */
export async function confirm(title, text, action, { isDangerous = false, more = null } = {}) {
  const body = h("div", h("p", text), more);
  return (await show(title, body, [["yes", action, isDangerous ? "danger" : "primary"], ["", "Cancel"]])) === "yes";
}

/** Ask for values. fields: [{name, label, type, value, options, min, max, step, required, placeholder}]; resolves to an object of texts, or null. */
export async function askFor(title, text, fields, action) {
  const inputs = fields.map((field) => [field.name, input(field)]);
  const rows = fields.map((field, index) => h("label.field", h("span", field.label), inputs[index][1]));
  if ((await show(title, h("div", text ? h("p", text) : null, rows), [["yes", action, "primary"], ["", "Cancel"]])) !== "yes") return null;
  return Object.fromEntries(inputs.map(([name, element]) => [name, element.type === "checkbox" ? element.checked : element.value]));
}

/** Return a native field: a select where there are options, else an input. */
export function input({ options, type = "text", value, label, name, ...attributes }) {
  delete attributes.isArea;
  if (options) {
    const made = options.map((option) => (Array.isArray(option) ? option : [option, option]));
    return h("select", { name, ...attributes }, made.map(([key, text]) => h("option", { value: key, selected: key === value }, text)));
  }
  return h("input", { type, name, ...(type === "checkbox" ? { checked: Boolean(value) } : { value: value ?? "" }), ...attributes });
}

/** Ask for the server's key; resolves to whether one was given. */
export async function askForKey() {
  const given = await askFor(
    "This server needs a key",
    "It is kept in this tab and sent as a header to this server alone. A key of the role training reads; one of the role admin also changes what is served.",
    [
      { name: "key", label: "Key", type: "password", required: true, autocomplete: "off" },
      { name: "stay", label: "Remember on this device", type: "checkbox" },
    ],
    "Use it",
  );
  if (!given) return false;
  setKey(given.key.trim(), given.stay);
  return true;
}
