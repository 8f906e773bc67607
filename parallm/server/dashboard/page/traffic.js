// Traffic: what clients have offered to learn from, which rewards it got, what became of it.
import { h, put, write } from "./element.js";
import { cut, duration, number, percent } from "./format.js";
import { state } from "./live.js";
import { setParams } from "./router.js";
import { table } from "./table.js";

const STATES = [["", "all"], ["waiting", "waiting for a reward"], ["rewarded", "rewarded"], ["trained", "trained on"], ["dropped", "dropped"]];
const EVERY = 3;

export async function open(context) {
  const counts = h("p.big", { role: "status" });
  const drops = h("dl.figures");
  const said = h("p.muted", { role: "status" });
  const choice = h("select", { "aria-label": "State" }, STATES.map(([name, title]) => h("option", { value: name, selected: name === (context.params.state ?? "") }, title)));
  const give = (row, thumb) => () =>
    context
      .send("POST", `/v1/trajectories/${encodeURIComponent(row.id)}/reward`, { reward: { thumb } })
      .then(({ reward }) => write(said, `reward ${number(reward, 3)} for ${row.id}`))
      .then(read)
      .catch((error) => write(said, error.message));
  const list = table({
    label: "Trajectories that clients have offered",
    columns: [
      { title: "age", text: (row) => duration(row.age), sort: (row) => row.age, isNumber: true },
      { title: "state", text: (row) => (row.state === "dropped" ? `dropped: ${row.reason}` : row.step ? `in step ${row.step}` : row.state) },
      { title: "version", text: (row) => number(row.version), sort: (row) => row.version, isNumber: true },
      { title: "prompt", cell: (row) => h("span.text", row.prompt === null ? "–" : cut(row.prompt.slice(-160), 160)) },
      { title: "text", cell: (row) => h("span.text", row.text === null ? "–" : cut(row.text, 300)) },
      { title: "reward", text: (row) => (row.reward === null ? "–" : number(row.reward, 3) + (row.waited === null ? "" : ` after ${duration(row.waited)}`)), sort: (row) => row.reward },
      { title: "your reward", cell: (row) => thumbs(row, give) },
      { title: "id", text: (row) => cut(row.id, 60) },
    ],
    key: (row) => `${row.policy} ${row.id}`,
    empty: "Nothing of this kind. Clients offer answers with collect_trajectory: true, the chat with \"learn from this\".",
  });
  const read = async () => {
    const query = { policy: state.policy, state: choice.value, limit: 100 };
    const [all, recent] = await Promise.all([context.get("/v1/trajectories"), context.get("/v1/trajectories/recent", query)]);
    const reports = Object.entries(all.data).filter(([name]) => !state.policy || name === state.policy).map(([, report]) => report);
    if (!reports.length) return void put(context.root, h("p.muted", "Nothing here learns from what clients ask for (train with rollout=live)."));
    showCounts(counts, drops, reports);
    list.show(recent.data);
  };
  choice.addEventListener("change", () => {
    setParams({ state: choice.value });
    void read().catch((error) => context.fail(error));
  });
  put(context.root, h("section.card", counts, h("h2", "Dropped, by reason"), drops), h("div.bar", h("label", "show ", choice), said), list.element, h("p.muted", "Only what clients offered with collect_trajectory: true is kept or shown."));
  await read();
  context.every(EVERY, () => read().catch(() => {}));
  return { keys: { j: () => list.move(1), k: () => list.move(-1) } };
}

function thumbs(row, give) {
  if (!["waiting", "rewarded"].includes(row.state)) return h("span.muted", "too late");
  const button = (mark, label, value) => h("button", { type: "button", "aria-label": `${label}: ${row.id}`, onclick: give(row, value) }, mark);
  return h("span.pills", button("▲", "good", 1), button("▼", "bad", 0));
}

function showCounts(counts, drops, reports) {
  const sum = (name) => reports.reduce((total, report) => total + report[name], 0);
  const reasons = {};
  for (const { dropped } of reports) for (const [reason, count] of Object.entries(dropped)) reasons[reason] = (reasons[reason] ?? 0) + count;
  const all = Object.values(reasons).reduce((total, count) => total + count, 0);
  write(counts, `${number(sum("num_waiting"))} waiting · ${number(sum("num_rewarded"))} rewarded · ${number(sum("num_reserved"))} in steps not saved yet · ${number(sum("num_trained"))} trained on · ${number(all)} dropped`);
  const row = ([reason, count]) => h("div.figure", h("dt", reason), h("dd", h("span.value", `${number(count)} (${percent(count / sum("num_collected"), 0)})`)));
  put(drops, all ? Object.entries(reasons).map(row) : h("p.muted", "none"));
}
