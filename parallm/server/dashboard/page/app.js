// Starts the page: the session, then the history and the stream at once; opens the view of the address.
import { mount } from "./actions.js";
import { h, put, write } from "./element.js";
import { askForKey } from "./dialogs.js";
import { buildHeader, buildNavigation, isPossible } from "./header.js";
import { setViewKeys } from "./keys.js";
import { isLive, look, on, readSession, state } from "./live.js";
import { current, link } from "./router.js";
import { address, download, get, send, takeKeyFromAddress, whenKeyIsMissing } from "./server.js";
import { VIEWS } from "./views.js";

const SAY_EVERY = 10000;
const main = document.getElementById("main");
let open = null; // {name, result, close}

/** Return an element that says what went wrong, with a button to try again. */
export function errorBox(error, again) {
  const text = error?.message ?? String(error);
  const button = again ? h("button", { type: "button", onclick: again }, "Try again") : null;
  return h("div.error", { role: "alert" }, h("p", text), button);
}

let saidAt = -SAY_EVERY;
let unsaid = 0;

/** Tell screen readers about a change, at most every ten seconds; the newest text wins. */
export function say(text) {
  clearTimeout(unsaid);
  const wait = Math.max(0, saidAt + SAY_EVERY - performance.now());
  unsaid = setTimeout(() => {
    saidAt = performance.now();
    write(document.getElementById("live"), text);
  }, wait);
}

/** What a view gets: its place, its address, and subscriptions and requests that end with it. */
function contextOf(place, root) {
  const ends = [];
  const controller = new AbortController();
  const options = { signal: controller.signal };
  return {
    root,
    parts: place.parts,
    params: place.params,
    signal: controller.signal,
    on: (kind, handler) => void ends.push(on(kind, handler)),
    every(seconds, handler) {
      const timer = setInterval(() => document.hidden || handler(), 1000 * seconds);
      ends.push(() => clearInterval(timer));
    },
    atEnd: (end) => void ends.push(end),
    get: (path, query) => get(path, query, options),
    send: (method, path, body) => send(method, path, body, options),
    download,
    address,
    runPath: (rest = "") => `/v1/runs/${encodeURIComponent(state.run ?? "current")}${rest}`,
    isLive,
    say,
    errorBox,
    fail(error, again) {
      if (error?.name !== "AbortError") put(root, errorBox(error, again));
    },
    close() {
      controller.abort();
      for (const end of ends) end();
    },
  };
}

async function showView() {
  const place = current();
  const view = VIEWS.find((one) => one.name === place.view && isPossible(one));
  if (open && open.name === place.view && open.result?.change) return open.result.change(place);
  open?.close();
  setViewKeys({});
  open = null;
  if (!view) return put(main, h("h1", "No such view"), h("p", `There is no view "${place.view}" here. `, h("a", { href: link("overview") }, "Overview")));
  const root = h("div.view", { class: `view-${view.name}` });
  const context = contextOf(place, root);
  const mine = (open = { name: place.view, result: null, close: context.close });
  put(main, h("h1", view.title), state.denied ? h("p.note", `What training has made is not shown: ${state.denied}.`) : null, root);
  document.title = `${view.title} · ParaLLM`;
  try {
    const module = await view.load();
    if (open !== mine) return;
    mine.result = (await module.open(context)) ?? null;
    if (open === mine) setViewKeys(mine.result?.keys);
  } catch (error) {
    if (open === mine) context.fail(error, showView);
  }
}

let looked = "";

async function follow() {
  const { run, policy } = current().params;
  const key = `${run ?? ""} ${policy ?? ""}`;
  if (looked !== key) {
    looked = key;
    open?.close();
    open = null;
    try {
      await look(run, policy);
    } catch (error) {
      looked = "";
      return put(main, h("h1", "This run cannot be shown"), errorBox(error, follow));
    }
  }
  await showView();
}

async function start() {
  takeKeyFromAddress();
  whenKeyIsMissing(askForKey);
  mount(buildHeader());
  buildNavigation();
  try {
    await readSession();
  } catch (error) {
    return put(main, h("h1", "ParaLLM"), errorBox(error, start));
  }
  addEventListener("hashchange", follow);
  on("status", (status) => status.state && say(`${status.state}, step ${status.step}`));
  await follow();
}

void start();
