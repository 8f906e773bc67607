// Settings: the run's as they were composed, with a search; and those of the page.
import { h, put } from "./element.js";
import { theme, setTheme } from "./header.js";
import { areOn, turn } from "./keys.js";
import { state } from "./live.js";
import { hasKey, setKey } from "./server.js";
import { table } from "./table.js";

export async function open(context) {
  const rows = table({
    label: "Settings of the run",
    columns: [
      { title: "Name", text: (row) => row.name, sort: (row) => row.name, class: "mono" },
      { title: "Value", text: (row) => row.value, class: "mono" },
    ],
    key: (row) => row.name,
    empty: "No setting has this name.",
  });
  const find = h("input", { type: "search", "aria-label": "Find a setting", placeholder: "find, such as learning_rate" });
  const run = h("section.card", h("h2", "The run, as composed"));
  put(context.root, run, page(context));
  if (state.run === null) return void run.append(h("p.muted", "Nothing is trained here. The settings that this server runs with are those of its command line."));
  const { values } = await context.get(context.runPath("/config"));
  const all = Object.entries(values).map(([name, value]) => ({ name, value: typeof value === "string" ? value : JSON.stringify(value) }));
  const show = () => rows.show(all.filter(({ name, value }) => `${name}=${value}`.toLowerCase().includes(find.value.toLowerCase())));
  find.addEventListener("input", show);
  run.append(h("div.bar", find), rows.element);
  show();
}

function page() {
  const choice = ["system", "light", "dark"].map((name) =>
    h("label", h("input", { type: "radio", name: "theme", value: name, checked: theme() === name, onchange: () => setTheme(name) }), name),
  );
  const keys = h("input", { type: "checkbox", checked: areOn(), onchange: (event) => turn(event.target.checked) });
  const forget = h("button", { type: "button", onclick: () => { setKey(null); location.reload(); } }, "Forget the key");
  const { session } = state;
  return h(
    "section.card",
    h("h2", "This page"),
    h("div.bar", { role: "group", "aria-label": "Theme" }, "Theme:", choice),
    h("div.bar", h("label", keys, "Single keys, such as g o; ? lists them")),
    h("p", session.has_keys ? `Your key ${session.key ?? ""} has the role ${session.role}. ` : "This server asks for no key: all who reach it may do all that it allows. ", hasKey() ? forget : null),
    session.control_routes ? null : h("p", "The server runs with server.control_routes=false: what reads or steers training is off."),
    h("p.muted", `ParaLLM ${session.version ?? ""}, base ${session.base ?? ""}`),
  );
}
