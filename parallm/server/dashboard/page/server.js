// Requests to the server that the page came from. The key stays in this tab and goes out as a header only.
import { visible } from "./element.js";

const PLACE = "parallm-key";
let key = sessionStorage.getItem(PLACE) ?? localStorage.getItem(PLACE);
let asking = null;
let ask = async () => false;

/** An answer of 400 and above, or none at all (status 0). */
export class Refused extends Error {
  constructor(status, message, code, param) {
    super(message);
    Object.assign(this, { status, code, param });
  }
}

/** Take `#key=...` out of the address, so that it is neither sent on nor kept in the history. */
export function takeKeyFromAddress() {
  const found = /^#key=([^&]+)/.exec(location.hash);
  if (!found) return;
  setKey(decodeURIComponent(found[1]), false);
  history.replaceState(null, "", location.pathname + location.search + "#overview");
}

export function setKey(value, isRemembered) {
  key = value;
  for (const store of [sessionStorage, localStorage]) store.removeItem(PLACE);
  if (value) (isRemembered ? localStorage : sessionStorage).setItem(PLACE, value);
}

export const hasKey = () => Boolean(key);

/** Set the function that asks a person for a key and resolves to whether one was given. */
export function whenKeyIsMissing(asker) {
  ask = asker;
}

/** Return the address of a route, relative to the page, so that a proxy may put a prefix before it. */
export function address(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const text = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return ".." + path + (text ? "?" + text : "");
}

/** Return the JSON of GET path. Raises Refused. */
export async function get(path, query, options) {
  return (await request("GET", address(path, query), undefined, options)).json();
}

/** Return the JSON of a request that changes something, null without content. Raises Refused. */
export async function send(method, path, body, options) {
  const text = await (await request(method, address(path), body, options)).text();
  return text ? JSON.parse(text) : null;
}

/** Save the answer of GET path as a file of the given name; a link could not send the key. */
export async function download(path, query, name) {
  const url = URL.createObjectURL(await (await request("GET", address(path, query))).blob());
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** Yield {event, data} of a stream of server-sent events; data is JSON, or null where it is none ("[DONE]"). */
export async function* events(path, { query, method = "GET", body, signal } = {}) {
  const answer = await request(method, address(path, query), body, { signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) yield parsed(block);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parsed(block) {
  let event = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) event = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  if (!data.length) return { event: "comment", data: null };
  const text = data.join("\n");
  return { event, data: /^[[{"\d-]/.test(text) && text !== "[DONE]" ? JSON.parse(text) : null };
}

async function request(method, url, body, { signal, headers = {} } = {}) {
  for (let attempt = 0; ; attempt++) {
    const used = key;
    const answer = await fetch(url, {
      method,
      signal,
      credentials: "omit",
      headers: { ...headers, ...(used ? { Authorization: `Bearer ${used}` } : {}), ...(body === undefined ? {} : { "Content-Type": "application/json" }) },
      body: body === undefined ? undefined : JSON.stringify(body),
    }).catch((error) => {
      throw error.name === "AbortError" ? error : new Refused(0, "The server does not answer.");
    });
    if (answer.ok) return answer;
    if (answer.status === 401 && attempt < 3 && (key !== used || (await keyIsGiven()))) continue;
    throw await refusal(answer);
  }
}

function keyIsGiven() {
  asking ??= ask().finally(() => (asking = null));
  return asking;
}

async function refusal(answer) {
  const text = await answer.text();
  let error = {};
  try {
    error = JSON.parse(text).error ?? {};
  } catch {
    error = { message: text.slice(0, 300) };
  }
  if (typeof error === "string") error = { message: error };
  return new Refused(answer.status, visible(error.message || `The server answered ${answer.status}.`), error.code, error.param);
}
