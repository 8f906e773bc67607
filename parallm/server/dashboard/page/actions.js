// Acts on the server: what each does, who may do it, and the same as a command. The bar in the header; other views use act().
import { h, put, write } from "./element.js";
import { askFor, show } from "./dialogs.js";
import { isLive, on, state } from "./live.js";
import { address, hasKey, send } from "./server.js";

const RANK = { inference: 1, training: 2, admin: 3 };
const ENDED = ["finished", "failed", "serving"];
const DONE_SECONDS = 20;

/** Return why this person cannot act by a route of this role now, "" if they can. trains: it is about training. */
export function reason(role, trains = false) {
  const { session, status } = state;
  if (!session) return "the session is not read yet";
  if (session.serves === false) return "this program shows runs and serves nothing";
  if (RANK[session.role] < RANK[role]) return `needs a key of the role ${role}; yours has the role ${session.role}`;
  if (session.control_routes === false) return "the server runs with server.control_routes=false";
  if (!trains) return "";
  if (!session.trains?.length) return "this process serves and does not train";
  if (!isLive()) return "this run is not the one in training";
  return ENDED.includes(status.state) ? "training has ended" : "";
}

/** Return the request as a command for a shell; it names the key and does not hold it. */
export function curlOf({ method, path, body, file }) {
  const quoted = (text) => `'${String(text).replaceAll("'", "'\\''")}'`;
  const words = ["curl", "-X", method];
  if (hasKey()) words.push("-H", '"Authorization: Bearer $PARALLM_API_KEY"');
  if (body !== undefined) words.push("-H", "'Content-Type: application/json'", "-d", quoted(JSON.stringify(body)));
  return [...words, quoted(new URL(address(path), location.href).href), ...(file ? ["-o", quoted(file)] : [])].join(" ");
}

/** Do an act: ask first where it has `ask` (what will happen), then say what came of it. Returns the answer, or null.

one: {title, ask, danger, method, path, body, done(answer) -> text, send() in place of a JSON request}. */
export async function act(one) {
  const curl = h("details", h("summary", "As a command"), h("pre.text", { tabindex: 0 }, curlOf(one)));
  if (one.ask) {
    const buttons = [["yes", one.title, one.danger ? "danger" : "primary"], ["", "Cancel"]];
    if ((await show(`${one.title}?`, h("div", h("p", one.ask), curl), buttons)) !== "yes") return null;
  }
  tell(`${one.title}: asked ...`);
  try {
    const answer = (await (one.send ? one.send() : send(one.method, one.path, one.body))) ?? {};
    tell(`${one.title}: ${one.done?.(answer) ?? "done"}`, curl);
    return answer;
  } catch (error) {
    if (error.name === "AbortError") return null;
    tell(`${one.title}: refused. ${error.message}`, curl, true);
    return null;
  }
}

/** Return a button that knows when it may be used: its title and its description say why not. */
export function button(text, role, onclick, { trains = false, label = null, kind = "", why = () => "" } = {}) {
  const id = `why-${++buttons}`;
  const note = h("span.unseen", { id });
  const made = h("button", { type: "button", class: kind, "aria-label": label, "aria-describedby": id, onclick }, text);
  const refresh = () => {
    const found = reason(role, trains) || why();
    made.disabled = Boolean(found);
    made.title = found;
    write(note, found);
  };
  refresh();
  return { element: h("span.act", made, note), button: made, refresh, reason: () => reason(role, trains) || why() };
}
let buttons = 0;

const message = h("div.done", { role: "status", hidden: true });
let hiding = 0;

function tell(text, more, isBad = false) {
  clearTimeout(hiding);
  const close = h("button.quiet", { type: "button", "aria-label": "Close this message", onclick: () => (message.hidden = true) }, "×");
  put(message, h("p", { class: isBad ? "bad" : "" }, text), more ?? null, close);
  message.hidden = false;
  // a refusal stays until it is read
  if (!isBad) hiding = setTimeout(() => (message.hidden = true), 1000 * DONE_SECONDS);
}

const policy = () => (state.session?.trains?.length > 1 ? { policy: state.policy || state.session.trains[0] } : {});
const training = (title, what, more) => ({ title, method: "POST", path: `/v1/training/${what}`, body: policy(), ...more });
const isPaused = () => ["paused", "pausing"].includes(state.status.state);
const at = (answer) => `step ${answer.step}, ${answer.state}`;
const score = ([name, row]) => {
  const accuracy = row["heldout/accuracy"];
  const figure = typeof accuracy === "number" ? `${(100 * accuracy).toFixed(1)}%` : `loss ${row["heldout/loss"]}`;
  return `${name}@${row["heldout/version"]} ${figure}`;
};

const ACTS = [
  { text: () => (isPaused() ? "Resume" : "Pause"), says: "Begin no further step after the present one; serving goes on. Resume begins steps again.",
    make: () => (isPaused() ? training("Resume", "resume", { done: at }) : training("Pause", "pause", { done: () => "after the present step" })) },
  { text: () => "Step", says: "Train one step: a new one while paused, else the present one is awaited.", make: () => training("Step", "update", { done: at }) },
  { text: () => "Save", says: "Write a checkpoint after the present step.",
    make: () => training("Save", "checkpoint", { done: (answer) => `in ${Object.values(answer.folders ?? {}).join(", ")}` }) },
  { text: () => "Evaluate", says: "Evaluate the newest version after the present step, unless it was.",
    make: () => training("Evaluate", "evaluate", { done: (answer) => Object.entries(answer.evaluations ?? {}).map(score).join(", ") }) },
  { text: () => "Stop", kind: "danger", says: "End training and go on serving.",
    make: () => training("Stop training", "stop", {
      danger: true,
      done: (answer) => `after step ${answer.step}; its versions are served on`,
      ask: "Training ends after the present step and a checkpoint is saved. The versions are served on until the process ends. The same command as before goes on from there later.",
    }) },
];

const OTHERS = [
  { title: "Shares", role: "admin", says: "Divide the device between serving, rollouts and learning.", make: shares },
  { title: "Clear caches", role: "admin", says: "Forget prefixes of prompts, which only save work.",
    make: () => ({ method: "POST", path: "/reset_prefix_cache", ask: "Requests compute their prompts anew, so that the next ones take longer.", danger: true }) },
  { title: "Abort a request", role: "admin", says: "End a request by its id; it answers with what it has.", make: abort },
];

async function shares() {
  const field = (name, label) => ({ name, label, type: "number", min: 0, max: 1, step: 0.05, placeholder: "as it is" });
  const given = await askFor(
    "Shares of the device",
    "Both count while there is work of several kinds, and hold until the process ends. A field left empty stays as it is.",
    [field("serving_share", "Serving, of the engine's share"), field("engine_share", "Engine (serving and rollouts), while an update runs, too")],
    "Next",
  );
  const body = Object.fromEntries(Object.entries(given ?? {}).filter(([, value]) => value !== "").map(([name, value]) => [name, Number(value)]));
  if (!Object.keys(body).length) return null;
  const shares = Object.entries(body).map(([name, value]) => `${name} ${value}`).join(", ");
  const ask = `From the next unit of work on: ${shares}. Runs with changed shares are hard to repeat.`;
  return { method: "PUT", path: "/v1/shares", body, ask, danger: true, done: (answer) => JSON.stringify(answer) };
}

async function abort() {
  const given = await askFor("Abort a request", "The view Device lists the ids of what runs.", [{ name: "id", label: "Id of the request", required: true }], "Next");
  if (!given?.id) return null;
  const path = `/v1/requests/${encodeURIComponent(given.id)}/cancel`;
  return { method: "POST", path, ask: `The request ${given.id} ends and answers with what it has.`, danger: true, done: (answer) => `${answer.aborted} ended` };
}

async function perform(one) {
  const made = await one.make();
  if (made) await act({ title: one.title, ...made });
}

function menu() {
  const line = (one, text, role, trains) => {
    const made = button(text, role, () => perform(one), { trains, kind: one.kind });
    const why = made.reason();
    return h("li", made.element, h("div", one.says, why ? h("div.muted", `Not now: ${why}.`) : null));
  };
  const own = ACTS.map((one) => line(one, one.text(), "training", true));
  const others = OTHERS.map((one) => line(one, one.title, one.role, false));
  return show("Actions", h("ul.acts", own, others), [["", "Close"]]);
}

/** Put the bar of actions into its place in the header. */
export function mount(slot) {
  const made = ACTS.map((one) => [one, button(one.text(), "training", () => perform(one), { trains: true, kind: one.kind ?? "" })]);
  const more = h("button", { type: "button", onclick: menu }, "Actions");
  const why = h("span.muted.why");
  put(slot, made.map(([, item]) => item.element), more, why);
  document.body.append(message);
  const refresh = () => {
    for (const [one, item] of made) {
      write(item.button, one.text());
      item.refresh();
    }
    write(why, reason("training", true));
  };
  for (const kind of ["session", "status", "connection", "history"]) on(kind, refresh);
  refresh();
}
