// The address of a view: #NAME/PART/PART?x=y. `run` and `policy` stay in it from view to view.

const STICKY = ["run", "policy"];

/** Return {view, parts, params} of the address bar. */
export function current() {
  const [path, query] = location.hash.slice(1).split("?");
  const [view, ...parts] = path.split("/").map(decoded);
  return { view: view || "overview", parts, params: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Return an address for href. Parameters that are null leave the address; run and policy stay. */
export function link(view, parts = [], params = {}) {
  const now = current().params;
  const kept = Object.fromEntries(STICKY.filter((name) => now[name]).map((name) => [name, now[name]]));
  const given = Object.entries({ ...kept, ...params }).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return "#" + [view, ...parts].map(encodeURIComponent).join("/") + (query ? "?" + query : "");
}

/** Go to a view; Back returns from it. */
export function go(view, parts, params) {
  location.hash = link(view, parts, params);
}

/** Change parameters of this view's address without a new entry of the history; null removes one. */
export function setParams(params) {
  const now = current();
  history.replaceState(null, "", link(now.view, now.parts, { ...now.params, ...params }));
}
