// The header: which run and policy, what it does now, how far it is, how old the newest news are; and the navigation.
import { h, keep, put, setAttributes, write } from "./element.js";
import { duration, number } from "./format.js";
import { help } from "./keys.js";
import { on, silence, state } from "./live.js";
import { current, go, link } from "./router.js";
import { VIEWS } from "./views.js";

const THEME = "parallm-theme";
const THEMES = ["system", "light", "dark"];
const ENDED = ["finished", "failed", "serving"];
const CONNECTIONS = {
  connecting: "connecting ...",
  lost: "not connected",
  hidden: "paused",
  off: "not live",
};

export const theme = () => localStorage.getItem(THEME) ?? "system";

export function setTheme(name) {
  if (name === "system") localStorage.removeItem(THEME);
  else localStorage.setItem(THEME, name);
  applyTheme();
}

function applyTheme() {
  document.documentElement.dataset.theme = theme();
  document.dispatchEvent(new Event("themechange"));
}

/** Fill the header and the navigation. Returns the element that holds the actions. */
export function buildHeader() {
  applyTheme();
  const parts = {
    run: h("strong.run"),
    policy: h("select", { "aria-label": "Policy", hidden: true, onchange: (event) => go(current().view, [], { policy: event.target.value }) }),
    state: h("span.pill"),
    progress: h("progress", { max: 1, "aria-label": "Steps done" }),
    step: h("span.step"),
    left: h("span.left"),
    news: h("span.news"),
    back: h("a", { href: "#overview", hidden: true }, "to the running one"),
  };
  const actions = h("div.actions", { id: "actions" });
  const looks = h("button.quiet", { type: "button", "aria-label": "Theme", title: "Theme: system, light or dark", onclick: nextTheme }, "◐");
  const keys = h("button.quiet", { type: "button", "aria-label": "Keys", title: "Keys (?)", onclick: help }, "?");
  put(
    document.getElementById("header"),
    h("a.brand", { href: "#overview" }, "ParaLLM"),
    h("div.where", parts.run, parts.policy, parts.back),
    h("div.state", parts.state, parts.progress, parts.step, parts.left, parts.news),
    h("div.tools", actions, looks, keys),
  );
  const refresh = () => show(parts);
  for (const kind of ["session", "status", "step", "connection", "history", "hello"]) on(kind, refresh);
  setInterval(refresh, 1000);
  refresh();
  return actions;
}

function nextTheme() {
  setTheme(THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]);
}

function show(parts) {
  const { session, status, history, run } = state;
  const row = run && run !== "current" ? state.runs.find((one) => one.id === run) : null;
  const policies = row?.policies?.length ? row.policies : (session?.trains ?? []);
  const step = Math.max(status.step ?? row?.step ?? 0, history?.last ?? 0) || null;
  const total = status.total_steps || row?.total_steps || null;
  write(parts.run, (run === "current" ? session?.run : run)?.split("~")[0] ?? (session ? session.base : ""));
  if (run) parts.run.title = run === "current" ? (session.run ?? "") : run;
  parts.policy.hidden = policies.length < 2;
  keep(parts.policy, policies, (name) => name, (name) => h("option", { value: name }, name));
  if (policies.length > 1) parts.policy.value = state.policy || policies[0];
  const word = row ? row.state : (status.state ?? (session?.trains?.length ? "" : session?.serves ? "serving" : ""));
  write(parts.state, word);
  parts.state.hidden = !word;
  parts.state.dataset.state = word;
  setAttributes(parts.progress, { hidden: !total });
  if (total) parts.progress.value = Math.min(1, step / total);
  write(parts.step, step === null ? "" : total ? `step ${number(step)} of ${number(total)}` : `step ${number(step)}`);
  write(parts.left, status.seconds_left && !ENDED.includes(word) ? `${duration(status.seconds_left)} left` : "");
  setAttributes(parts.back, { hidden: !(row && session?.run && run !== session.run), href: link("overview", [], { run: null, policy: null }) });
  const [text, kind] = news();
  write(parts.news, text);
  parts.news.dataset.kind = kind;
}

/** Return what is said of the connection: nothing on screen pretends to be live. */
function news() {
  const seconds = silence();
  if (CONNECTIONS[state.connection]) return [CONNECTIONS[state.connection], state.connection === "lost" ? "bad" : "off"];
  if (state.connection === "late") return [`no news for ${duration(seconds)}`, "look"];
  return [`live`, "ok"];
}

/** Show the navigation with the view on screen marked. */
export function buildNavigation() {
  const more = h("div.more");
  const toggle = h("button.more-toggle", { type: "button", "aria-expanded": "false" }, "More");
  toggle.addEventListener("click", () => toggle.setAttribute("aria-expanded", String(nav.classList.toggle("open"))));
  const nav = document.getElementById("views");
  const place = () => {
    nav.classList.remove("open");
    toggle.setAttribute("aria-expanded", "false");
    const { view } = current();
    const one = ({ name, title, key, isMain }) =>
      h("a", { href: link(name), class: isMain ? "main-view" : "", title: `${title} (g ${key})`, "aria-current": name === view ? "page" : null }, title);
    put(nav, VIEWS.filter(isPossible).map(one), toggle, more);
  };
  for (const kind of ["session", "history"]) on(kind, place);
  addEventListener("hashchange", place);
  place();
}

/** Whether this server can show a view: without a model there is nothing to chat with. */
export function isPossible(view) {
  return view.needs !== "live" || state.session?.serves !== false;
}
