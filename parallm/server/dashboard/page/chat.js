// Chat: one prompt to two versions side by side; votes and corrections become rewards of live traffic.
import { firstDifference, likeness } from "./difference.js";
import { h, put, setAttributes, write } from "./element.js";
import { number, plural } from "./format.js";
import { state } from "./live.js";
import { setParams } from "./router.js";
import { events } from "./server.js";
import { tokenView } from "./tokens.js";

export async function open(context) {
  const { data } = await context.get("/v1/models");
  const names = data.map(({ id }) => id);
  const policy = state.policy || state.session?.trains?.[0];
  const first = names.includes(policy) ? policy : names[0];
  const pick = (name, otherwise) => (names.includes(context.params[name]) ? context.params[name] : otherwise);
  const chat = { context, tally: {}, isBlind: false, isSwapped: false, stop: null };
  chat.sides = [side(chat, "left", names, pick("left", first)), side(chat, "right", names, pick("right", names.includes("base") ? "base" : first))];
  const fields = settings(context.params, state.session?.learns_live ?? []);
  const prompt = h("textarea", { rows: 4, "aria-label": "Prompt", placeholder: "Ask both versions the same" });
  prompt.value = context.params.prompt ?? "";
  const send = h("button.primary", { type: "button" }, "send");
  const stop = h("button", { type: "button", hidden: true, onclick: () => chat.stop?.abort() }, "stop");
  const anew = h("button", { type: "button", onclick: () => chat.sides.forEach((one) => one.clear()) }, "begin anew");
  const blind = h("input", { type: "checkbox", onchange: (event) => turnBlind(chat, event.target.checked) });
  const verdict = (chat.verdict = h("div.verdict", { role: "status" }));
  const ask = async () => {
    if (!prompt.value.trim() || chat.stop) return;
    chat.stop = new AbortController();
    send.disabled = true;
    stop.hidden = false;
    put(verdict);
    if (chat.isBlind) shuffle(chat);
    const asked = prompt.value;
    await Promise.all(chat.sides.map((one) => one.ask(asked, fields.values(one.model()), AbortSignal.any([context.signal, chat.stop.signal]))));
    chat.stop = null;
    send.disabled = false;
    stop.hidden = true;
    if (chat.sides.every((one) => one.answer)) compare(chat);
  };
  send.addEventListener("click", ask);
  prompt.addEventListener("keydown", (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && void ask());
  put(
    context.root,
    h("section.card", h("div.bar", chat.sides.map((one) => one.choice), h("label", blind, "blind until you vote")), prompt, fields.element, h("div.bar", send, stop, anew, h("span.muted", "Ctrl+Enter sends."))),
    verdict,
    h("div.halves", chat.sides.map((one) => one.element)),
    (chat.votes = h("p.muted")),
  );
  return { change() {} };
}

/** The fields of a request, and whether the policy learns from the answers. */
function settings(params, learners) {
  const field = (label, attributes) => [label, h("input", { type: "number", "aria-label": label, ...attributes })];
  const rows = { temperature: field("temperature", { value: "1", min: "0", step: "0.1" }), max_tokens: field("max tokens", { value: "256", min: "1" }), seed: field("seed", { placeholder: "none" }) };
  const system = h("input", { "aria-label": "System message", placeholder: "system message", value: params.system ?? "" });
  const learn = h("input", { type: "checkbox", disabled: !learners.length });
  const why = learners.length ? `learn from this: ${learners.join(", ")} trains on what you vote for` : "learn from this (needs rollout=live)";
  return {
    element: h("div.bar", Object.values(rows).map(([label, input]) => h("label", label, " ", input)), system, h("label", learn, why)),
    values(model) {
      const given = Object.fromEntries(Object.entries(rows).filter(([, [, input]]) => input.value !== "").map(([name, [, input]]) => [name, Number(input.value)]));
      return { given, system: system.value, learns: learn.checked && learners.includes(model.split("@")[0]) };
    },
  };
}

/** One side: a version, its turns, its newest answer. */
function side(chat, name, names, chosen) {
  const select = h("select", { "aria-label": name }, names.map((one) => h("option", { value: one, selected: one === chosen }, one)));
  const title = h("h2");
  const log = h("div");
  const turns = [];
  const self = {
    name,
    answer: null,
    choice: h("label", `${name} `, select),
    element: h("section.card", { "aria-label": `${name} answers` }, title, log),
    model: () => select.value,
    title: (text) => write(title, text),
    clear() {
      turns.length = 0;
      self.answer = null;
      put(log);
      put(chat.verdict);
    },
    async ask(text, { given, system, learns }, signal) {
      self.answer = null;
      const answer = { model: self.model(), text: "", tokens: [], ids: [], promptIds: [], trajectory: null };
      const shown = h("div.text", { "aria-busy": "true" });
      const note = h("p.muted");
      const turn = h("div.turn", h("p.text.asked", text), shown, note);
      log.append(turn);
      turns.push({ role: "user", content: text });
      const body = { model: answer.model, messages: [...(system ? [{ role: "system", content: system }] : []), ...turns], stream: true, logprobs: true, return_token_ids: true, ...given, ...(learns ? { collect_trajectory: true } : {}) };
      const began = performance.now();
      let first = null;
      try {
        for await (const { data } of events("/v1/chat/completions", { method: "POST", body, signal })) {
          if (data?.error) throw new Error(data.error.message);
          take(answer, data);
          if (answer.tokens.length) first ??= performance.now();
          write(shown, answer.text);
        }
      } catch (error) {
        turns.pop();
        if (chat.context.signal.aborted) return;
        return void put(note, chat.context.errorBox(error.name === "AbortError" ? "Stopped." : error));
      }
      const seconds = Math.max(1e-3, (performance.now() - (first ?? began)) / 1000);
      turns.push({ role: "assistant", content: answer.text });
      answer.view = tokenView(answer.tokens, `Tokens of the ${name} answer`);
      shown.replaceWith(answer.view.element);
      write(note, `${plural(answer.tokens.length, "token")}, ${number(Math.max(0, answer.tokens.length - 1) / seconds, 3)} a second, the first after ${number(((first ?? performance.now()) - began) / 1000, 2)} s · ${answer.finish ?? "no end"}`);
      turn.append(votes(chat, self, answer));
      self.answer = answer;
    },
  };
  select.addEventListener("change", () => {
    setParams({ [name]: select.value });
    self.clear();
    named(chat, self);
  });
  named(chat, self);
  return self;
}

function named(chat, one) {
  one.title(chat.isBlind ? (one.name === "left" ? "one" : "the other") : one.model());
}

/** Add a chunk of the stream to the answer. */
function take(answer, data) {
  const choice = data?.choices?.[0];
  if (data?.prompt_token_ids) answer.promptIds = data.prompt_token_ids;
  if (!choice) return;
  const text = choice.delta?.content ?? "";
  const content = choice.logprobs?.content ?? [];
  // a token may end inside of a character, whose text then comes with a later one
  const isWhole = content.map(({ token }) => token).join("") === text;
  content.forEach(({ token, logprob }, place) => answer.tokens.push({ text: isWhole ? token : place === content.length - 1 ? text : "", id: null, logprob }));
  if (!content.length && text && answer.tokens.length) answer.tokens.at(-1).text += text;
  answer.text += text;
  for (const id of choice.token_ids ?? []) answer.ids.push(id);
  answer.tokens.forEach((token, place) => (token.id = answer.ids[place] ?? null));
  answer.trajectory = choice.trajectory_id ?? answer.trajectory;
  answer.finish = choice.finish_reason ?? answer.finish;
}

/** Say where both answers part; offer the probability of each under the other version. */
function compare(chat) {
  const [left, right] = chat.sides.map((one) => one.answer);
  const place = firstDifference(left.ids, right.ids);
  const line = place < 0 ? "Both answers have the same tokens." : `The answers differ from token ${place + 1} on.`;
  const score = (own, other, name) => h("button", { type: "button", onclick: (event) => scored(chat, own, other, event.target) }, `how likely is the ${name} answer under the other?`);
  put(chat.verdict, h("p", line), h("div.bar", score(left, right, "left"), score(right, left, "right")));
}

/** Score the tokens of `own` under both versions, at temperature 1, and colour them by the difference. */
async function scored(chat, own, other, button) {
  button.disabled = true;
  const under = async (model) => {
    const body = { model, prompt: [...own.promptIds, ...own.ids], max_tokens: 0, prompt_logprobs: 0, temperature: 1 };
    const answer = await chat.context.send("POST", "/v1/completions", body);
    return answer.choices[0].prompt_logprobs.slice(-own.ids.length).map((entry, place) => entry[own.ids[place]].logprob);
  };
  try {
    const [here, there] = await Promise.all([under(own.model), under(other.model)]);
    own.tokens.forEach((token, place) => (token.other = there[place] - here[place]));
    own.view.colour("other");
    const mean = (values) => values.reduce((sum, value) => sum + value, 0) / Math.max(1, values.length);
    const names = chat.isBlind ? ["its own version", "the other"] : [own.model, other.model];
    button.replaceWith(h("p.note", `Log-prob a token: ${number(mean(here), 3)} under ${names[0]}, ${number(mean(there), 3)} under ${names[1]}; the whole text is ${number(Math.exp(there.reduce((sum, value, place) => sum + value - here[place], 0)), 3)} times as likely there.`));
  } catch (error) {
    button.replaceWith(chat.context.errorBox(error));
  }
}

/** Thumbs and a correction: rewards of the trajectory, if there is one. */
function votes(chat, one, answer) {
  const said = h("span.muted", { role: "status" });
  const reward = async (parts, text) => {
    if (!answer.trajectory) return write(said, `${text}; kept on this page only`);
    const { reward: total } = await chat.context.send("POST", `/v1/trajectories/${encodeURIComponent(answer.trajectory)}/reward`, { reward: parts });
    return write(said, `${text}; reward ${number(total, 3)} sent for ${answer.trajectory}`);
  };
  const safely = (act) => () => act().catch((error) => write(said, error.message));
  const thumb = (mark, label, value) => {
    const button = h("button", { type: "button", "aria-label": `${label}: the ${one.name} answer`, "aria-pressed": "false" }, mark);
    button.addEventListener("click", safely(async () => {
      await reward({ thumb: value }, label);
      for (const each of thumbs) setAttributes(each, { "aria-pressed": String(each === button) });
      note(chat, answer, value);
    }));
    return button;
  };
  const thumbs = [thumb("▲", "good", 1), thumb("▼", "bad", 0)];
  const wanted = h("textarea", { rows: 3, "aria-label": `What the ${one.name} answer should have been` });
  const correct = safely(async () => {
    const alike = likeness(answer.text, wanted.value);
    await reward({ likeness: alike }, `${number(100 * alike, 2)}% like your correction`);
    note(chat, answer, alike);
  });
  const fix = h("details", h("summary", "correct it"), h("p.muted", "The answer is rewarded by how alike it is to yours, 0 to 1."), wanted, h("button", { type: "button", onclick: correct }, "send the correction"));
  return h("div", h("div.bar", thumbs, said), fix);
}

/** Count a vote and, where it was blind, tell which is which. */
function note(chat, answer, value) {
  const count = (chat.tally[answer.model] ??= { up: 0, all: 0 });
  count.up += value;
  count.all += 1;
  for (const one of chat.sides) one.title(one.model());
  write(chat.votes, "Your votes: " + Object.entries(chat.tally).map(([model, { up, all }]) => `${model} ${number(up, 3)} of ${all}`).join(", "));
}

function turnBlind(chat, isBlind) {
  chat.isBlind = isBlind;
  for (const one of chat.sides) {
    one.choice.hidden = isBlind;
    one.clear();
    named(chat, one);
  }
}

/** Change sides by chance and hide the names again. */
function shuffle(chat) {
  const [left, right] = chat.sides.map((one) => one.choice.querySelector("select"));
  if (Math.random() < 0.5) {
    chat.sides.forEach((one) => one.clear());
    [left.value, right.value] = [right.value, left.value];
  }
  for (const one of chat.sides) named(chat, one);
}
