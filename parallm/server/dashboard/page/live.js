// What the page knows and what is new: the session, the run that is looked at, its history, and the stream of events.
import { readHistory } from "./history.js";
import { events, get, Refused } from "./server.js";

const LATE = 10;
const LOST = 30;
const HIDDEN = 30;
const WAITS = [1, 2, 4, 8, 16, 30];

/** What the page knows; the views read it and change none of it. */
export const state = {
  session: null,
  runs: [],
  run: null, // an id of /v1/runs, or current
  policy: "",
  history: null,
  happenings: [],
  status: {}, // of the policy that is looked at
  pulse: {},
  denied: "", // why what training has made may not be read
  connection: "connecting", // live, late, lost, hidden, off
  newsAt: 0, // performance.now() / 1000 of the newest event
  ahead: 0, // seconds that the clock of the server is ahead
};

const listeners = new Map();

/** Call handler(data) for each event of a kind: step, status, evaluation, pulse, happening, log, lost, bye, and of the
page's own: connection, history (read anew), session. Returns a function that ends it. */
export function on(kind, handler) {
  if (!listeners.has(kind)) listeners.set(kind, new Set());
  listeners.get(kind).add(handler);
  return () => listeners.get(kind).delete(handler);
}

export function tell(kind, data) {
  for (const handler of [...(listeners.get(kind) ?? [])]) handler(data);
}

/** Seconds since 1970 by the server's clock. */
export const now = () => Date.now() / 1000 + state.ahead;

/** Whether what is looked at may still change. */
export const isLive = () => state.run === "current" || state.run === null;

let sessionsAsked = 0;
let sessionsAnswered = 0;

/** Read the session; an answer that a later one has overtaken changes nothing. */
export async function readSession() {
  const own = ++sessionsAsked;
  const session = await get("/v1/session");
  if (own < sessionsAnswered) return state.session;
  sessionsAnswered = own;
  state.session = session;
  state.ahead = session.now - Date.now() / 1000;
  tell("session", session);
  return session;
}

/** Look at a run and a policy: read what there is. Raises Refused. */
export async function look(run, policy) {
  const id = run && run !== state.session.run ? run : state.session.run ? "current" : null;
  Object.assign(state, { run: id, policy: policy ?? "", history: null, happenings: [], status: {} });
  await readAnew();
  const watched = isLive() && state.session.serves !== false;
  if (watched && !stream) void watch();
  if (!watched) stop("off");
}

let historiesAsked = 0;
let historiesAnswered = 0;

async function readAnew() {
  const { run, policy } = state;
  const own = ++historiesAsked;
  const isOld = () => own < historiesAnswered || state.run !== run || state.policy !== policy;
  if (run === null) return tell("history", null);
  let denied = "";
  const history = await readHistory(run, policy).catch((error) => {
    if (![403, 404].includes(error.status)) throw error;
    if (error.status === 403) denied = error.message;
    return null;
  });
  if (isOld()) return;
  historiesAnswered = own;
  Object.assign(state, { history, denied });
  tell("history", history);
  const happened = await get(`/v1/runs/${encodeURIComponent(run)}/happenings`, { policy, limit: 500 }).catch(() => ({ data: [] }));
  if (isOld()) return;
  state.happenings = happened.data;
  tell("happenings", happened.data);
}

let stream = null;

async function watch() {
  for (let failures = 0; ; failures++) {
    stream = new AbortController();
    try {
      const { history, policy } = state;
      const query = { policy, since: history?.last, epoch: history?.epoch };
      for await (const { event, data } of events("/v1/events", { query, signal: stream.signal })) {
        failures = 0;
        receive(event, data);
      }
    } catch (error) {
      if (error.name === "AbortError") return;
      if (error instanceof Refused && [403, 404].includes(error.status)) return stop("off");
    }
    connect("lost");
    await pause(failures);
    if (!stream || stream.signal.aborted) return;
  }
}

const pause = (failures) => new Promise((resolve) => setTimeout(resolve, 1000 * WAITS[Math.min(failures, WAITS.length - 1)]));

function stop(connection) {
  stream?.abort();
  stream = null;
  connect(connection);
}

function connect(connection) {
  if (state.connection === connection) return;
  state.connection = connection;
  tell("connection", connection);
}

const isOurs = (data) => !data?.policy || !state.policy || data.policy === state.policy;

const RECEIVERS = {
  hello(data) {
    state.ahead = data.now - Date.now() / 1000;
    Object.assign(state, { status: data.status ?? {}, pulse: data.pulse ?? {} });
    tell("status", state.status);
    tell("pulse", state.pulse);
    if (state.run !== null && data.epoch !== state.history?.epoch) void refresh();
  },
  step(data) {
    if (isOurs(data) && state.run === "current" && state.history?.add(data)) tell("step", data);
  },
  status(data) {
    if (isOurs(data)) tell("status", (state.status = data));
  },
  pulse(data) {
    tell("pulse", (state.pulse = data));
  },
  happening(data) {
    if (!isOurs(data)) return;
    state.happenings.push(data);
    if (state.happenings.length > 1000) state.happenings.splice(0, 500);
    tell("happening", data);
  },
  lost: () => void refresh(),
  bye: () => stop("lost"),
};

function receive(event, data) {
  state.newsAt = performance.now() / 1000;
  connect("live");
  if (event === "comment") return;
  if (Object.hasOwn(RECEIVERS, event)) RECEIVERS[event](data ?? {});
  else tell(event, data);
}

let asked = 0;

/** Read all anew, until the server answers or somebody asks again. */
async function refresh() {
  const own = ++asked;
  for (let failures = 0; own === asked; failures++) {
    try {
      await readSession();
      if (own === asked) await readAnew();
      return;
    } catch (error) {
      if (!(error instanceof Refused) || (error.status > 0 && error.status < 500)) return;
    }
    await pause(failures);
  }
}

/** Seconds since the newest event, null where nothing is awaited. */
export const silence = () => (state.connection === "off" || !state.newsAt ? null : performance.now() / 1000 - state.newsAt);

setInterval(() => {
  const seconds = silence();
  if (seconds === null || state.connection === "hidden") return;
  if (seconds > LOST) connect("lost");
  else if (seconds > LATE && state.connection === "live") connect("late");
}, 1000);

// a browser opens about six connections to one server: a tab that nobody sees keeps none
let leaving = 0;
document.addEventListener("visibilitychange", () => {
  clearTimeout(leaving);
  if (document.hidden) leaving = setTimeout(() => stream && stop("hidden"), HIDDEN * 1000);
  else if (state.connection === "hidden" || (state.connection === "lost" && !stream)) void watch();
});
