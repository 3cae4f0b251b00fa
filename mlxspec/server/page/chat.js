// A chat with one of the served models, streamed from /v1/chat/completions.
// Rule: a conversation changes only when an answer came; a message without one goes back into the field.

import { BROKE_OFF, Refused, events, send } from "./api.js";
import { choose, fresh, keep, setUpConversations, stored } from "./conversations.js";
import { $, element, fill, put } from "./dom.js";
import { give, setUpPictures, take } from "./pictures.js";
import { fault, settings, setUpSettings } from "./settings.js";
import { AnswerTurn, errorTurn, keepPlace, setUpTurns, toEnd, userTurn } from "./turns.js";

const OPEN = "mlxspec-open"; // in sessionStorage: the conversation of this tab
const BROKEN = "broke off";
const SPOKEN = 500; // characters of an answer that a screen reader says when it has ended
const LOCKED = "the server asks for its API key: enter it, then send this again";

let talk = fresh();
let shown = []; // { turn, made }: the turns in the log, and their elements
let running = null; // the AbortController of the running answer
let queued = false; // whether the text in the field is sent when that ends
let editing = -1; // the index of the turn that the next message replaces
let models = []; // of the last snapshot
let loading = ""; // the model that is being loaded
let onLocked = () => {}; // called when the API key was refused

const info = () => models.find((m) => m.info.name === $("model").value)?.info;
const sees = () => Boolean(info()?.sees);
const note = (text) => put($("chat-note"), text);

// ---- what is shown

function show(turns) {
  for (const made of $("log").querySelectorAll(".turn.error")) made.remove();
  let same = 0;
  while (same < shown.length && shown[same].turn === turns[same]) same++;
  for (const { made } of shown.splice(same)) made.remove();
  for (const turn of turns.slice(same)) shown.push({ turn, made: draw(turn) });
}

function draw(turn) {
  if (turn.role === "user") return userTurn(turn, () => edit(turn));
  const view = new AnswerTurn(again);
  if (turn.thought) {
    view.think(turn.thought);
    view.thinkingEnds(turn.thinking);
  }
  view.add(turn.content);
  view.end(turn.note);
  return view.made;
}

function open(next) {
  running?.abort();
  queued = false;
  talk = next;
  sessionStorage.setItem(OPEN, talk.id);
  leaveEdit();
  note("");
  show(talk.turns);
  toEnd();
  gauge();
  choose(talk.id);
  listed(false);
}

function begin() {
  open(fresh());
  $("say").focus();
}

function gauge() {
  const used = talk.used ?? 0, most = info()?.context ?? 0;
  $("context").hidden = !used || !most;
  if (!most) return;
  const share = Math.min(1, used / most), said = `${used.toLocaleString("en")} of ${most.toLocaleString("en")} tokens`;
  put($("context-text"), said);
  const bar = $("context-bar");
  bar.setAttribute("aria-valuenow", Math.round(100 * share));
  bar.setAttribute("aria-valuetext", said);
  bar.classList.toggle("much", share > 0.85);
  bar.firstElementChild.style.width = `${100 * share}%`;
}

function busy(on) {
  $("send").hidden = on;
  $("stop").hidden = !on;
  $("log").setAttribute("aria-busy", on);
}

// ---- editing, asking again

function edit(turn) {
  if (running) return note("Stop the answer first: Esc");
  editing = talk.turns.indexOf(turn);
  $("say").value = turn.content;
  take();
  give(turn.pictures ?? []);
  note("Sending replaces this message and all that follows; Esc leaves it as it is");
  for (const [n, { made }] of shown.entries()) made.classList.toggle("replaced", n >= editing);
  $("say").focus();
}

function leaveEdit() {
  if (editing < 0) return;
  editing = -1;
  $("say").value = "";
  take();
  note("");
  for (const { made } of shown) made.classList.remove("replaced");
}

async function again() {
  if (running || talk.turns.at(-1)?.role !== "assistant") return;
  leaveEdit();
  const wrong = await answer(talk, talk.turns.slice(0, -1));
  if (wrong?.message) explain(wrong);
}

function explain({ message, full }) {
  keepPlace(() => errorTurn(message, full && begin).classList.toggle("locked", message === LOCKED));
}

// ---- asking

async function ask() {
  const text = $("say").value.trim();
  if (running) {
    queued = Boolean(text);
    return void (queued && note("Sent when this answer has ended; Esc stops the answer"));
  }
  const bad = fault();
  if (bad) return note(bad);
  const pictures = take();
  if (!text && !pictures.length) return;
  $("say").value = "";
  const mine = talk, at = editing, before = editing < 0 ? mine.turns : mine.turns.slice(0, editing);
  editing = -1;
  note("");
  const turn = { role: "user", content: text, ...(pictures.length ? { pictures } : {}) };
  const wrong = await answer(mine, [...before, turn]);
  if (wrong && !wrong.kept && talk === mine) {
    if (!$("say").value) $("say").value = text;
    give(pictures);
    editing = at;
  }
  if (wrong?.message && talk === mine) explain(wrong);
  const next = queued && talk === mine && !wrong;
  if (queued) note("");
  queued = false;
  if (next) await ask();
}

function messagesOf(turns) {
  return turns.map(({ role, content, pictures = [], lost }) => {
    const text = content || (lost ? "(an image that was not kept)" : "");
    const parts = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
    return { role, content: parts.length ? [...parts, ...(content ? [{ type: "text", text }] : [])] : text };
  });
}

// Asks for an answer to turns that end with one of the user's, and makes both the conversation. Returns null,
// or what went wrong: `message` for the user, "" if it was stopped; `kept`: part of an answer came; `full`: the
// context is full.
async function answer(mine, turns) {
  show(turns);
  const control = (running = new AbortController());
  const view = new AnswerTurn(again);
  view.made.classList.add("coming");
  toEnd();
  busy(true);
  const found = { text: "", thought: "", usage: null, finish: "", most: info()?.context ?? Infinity, read: "", began: performance.now(), first: 0, wrote: 0 };
  const wait = () => put(view.waits, found.first ? "" : loading ? `loading ${loading} first` : found.read);
  const told = setInterval(wait, 250);
  const leave = () => keep({ ...mine, turns: [...turns, ...(found.text || found.thought ? [made(found, BROKEN)] : [])] });
  window.addEventListener("pagehide", leave);
  let wrong = null;
  try {
    const { first, body } = settings();
    Object.assign(body, { model: $("model").value || undefined, messages: [...first, ...messagesOf(turns)] });
    Object.assign(body, { stream: true, stream_options: { include_usage: true, include_progress: true } });
    await read(await send("/v1/chat/completions", { method: "POST", body, signal: control.signal }), view, found);
  } catch (error) {
    if (!control.signal.aborted) wrong = { message: error.message, full: error.code === "context_length_exceeded" };
    if (error.status === 401) {
      wrong = { message: LOCKED };
      onLocked();
    }
    if (!(error instanceof Refused) && !control.signal.aborted) console.error(error);
  }
  clearInterval(told);
  window.removeEventListener("pagehide", leave);
  running = null;
  busy(false);
  if (document.activeElement === document.body) $("say").focus(); // the button with the focus is hidden
  return settle(mine, turns, view, found, control.signal.aborted, wrong);
}

// What becomes of an answer that has ended: see `answer`.
function settle(mine, turns, view, found, stopped, wrong) {
  const here = talk === mine && view.made.isConnected;
  if (!found.text && !found.thought) {
    view.made.remove();
    if (here) show(mine.turns);
    return wrong ?? { message: stopped ? "" : "the model returned an empty answer" };
  }
  const { usage, most } = found;
  if (usage) mine.used = usage.prompt_tokens + usage.completion_tokens;
  const full = found.finish === "length" && mine.used >= most;
  const reason = stopped ? "stopped" : wrong ? BROKEN : full ? "cut: the context is full" : REASONS[found.finish] ?? found.finish;
  const turn = made(found, reason);
  view.thinkingEnds(found.thinking);
  view.end(turn.note);
  mine.turns = [...turns, turn];
  const fits = mine.gone || keep(mine);
  if (!here) return null;
  shown.push({ turn, made: view.made });
  put($("answered"), `Answer, ${reason}: ${view.body.textContent.slice(0, SPOKEN)}`);
  if (!fits) note("This conversation is too long to be kept in the browser");
  gauge();
  if (full) return { message: "The context is full. Begin a new chat, or edit an earlier message.", full, kept: true };
  return wrong && { ...wrong, kept: true };
}

// The turn of an answer.
function made(found, reason) {
  const { text, thought, thinking } = found;
  return { role: "assistant", content: text, note: summary(found, reason), ...(thought ? { thought, thinking } : {}) };
}

const REASONS = { stop: "complete", length: "cut at the limit of tokens", tool_calls: "called a tool" };

async function read(response, view, found) {
  for await (const data of events(response)) {
    if (data === "[DONE]") break;
    const said = JSON.parse(data);
    if (said.error) throw new Refused(said.error.message, 0, said.error.code);
    if (said.usage) found.usage = said.usage;
    const progress = said.prompt_progress;
    if (progress) found.read = `${progress.processed} of ${progress.total} prompt tokens read`;
    const { delta = {}, finish_reason: finish } = said.choices?.[0] ?? {};
    const { content, reasoning_content: thought } = delta;
    if (finish) found.finish = finish;
    if (content || thought) {
      found.wrote = performance.now();
      found.first ||= found.wrote;
    }
    if (thought) {
      found.thought += thought;
      view.think(thought);
    }
    if (content) {
      if (found.thought && !found.text) view.thinkingEnds((found.thinking = (found.wrote - found.first) / 1000));
      found.text += content;
      view.add(content);
    }
  }
  if (!found.finish) throw new Refused(BROKE_OFF);
}

function summary({ usage, began, first, wrote }, reason) {
  if (!usage) return reason;
  const seconds = (wrote - first) / 1000, tokens = usage.completion_tokens;
  const rate = tokens > 1 && seconds > 0.05 ? `${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
  const kept = usage.completion_tokens_details?.accepted_prediction_tokens ?? 0;
  const hit = usage.prompt_tokens_details?.cached_tokens ?? 0;
  return [
    `${tokens} tokens`,
    rate,
    reason,
    `first after ${((first - began) / 1000).toFixed(2)} s`,
    `${hit} of ${usage.prompt_tokens} prompt tokens cached`,
    kept && `${kept} drafted ahead`,
    usage.completion_tokens_details?.loops_ended && "a repetition was ended",
  ].filter(Boolean).join(" · ");
}

// ---- set up

// What a snapshot says of the models.
export function know(now) {
  ({ loading } = now);
  const under = (m, name) => ({ ...m, info: { ...m.info, name } });
  const profilesOf = (m) => Object.keys(now.profiles).filter((name) => now.profiles[name] === m.info.name && name !== m.info.name);
  models = now.models.flatMap((m) => [m, ...profilesOf(m).map((name) => under(m, name))]);
  const pick = $("model"), names = models.map((m) => m.info.name), chosen = pick.value;
  const label = (m) => (m.status === "unloaded" ? `${m.info.name} (not loaded)` : m.info.name);
  fill(pick, (box) => {
    for (const m of models) element(box, "option", "", label(m)).setAttribute("value", m.info.name);
  });
  pick.value = names.includes(chosen) ? chosen : names[0]; // moving options changes which is selected
  known();
}

function known() {
  $("picture-add").hidden = !sees();
  gauge();
}

// The key was accepted: what asked for it has had its day.
export function unlocked() {
  for (const made of $("log").querySelectorAll(".turn.locked")) made.remove();
}

export function pickModel(name) {
  $("model").value = name;
  known();
}

function stop() {
  queued = false;
  note("");
  running?.abort();
}

function listed(on) {
  document.body.classList.toggle("talks", on);
  $("talks-open").setAttribute("aria-expanded", on);
}

function onKey(event) {
  if (event.key !== "Escape") return;
  if (document.body.classList.contains("talks")) {
    listed(false);
    $("talks-open").focus();
  } else if (running) stop();
  else leaveEdit();
}

// `locked()` is called when the API key was refused.
export function setUpChat(locked) {
  onLocked = locked;
  setUpPictures(sees);
  setUpTurns();
  setUpSettings();
  setUpConversations(open, () => {
    talk.gone = true; // an answer that still comes does not bring it back
    begin();
  });
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  $("say").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    ask();
  });
  $("chat").addEventListener("keydown", onKey);
  $("stop").addEventListener("click", stop);
  $("new").addEventListener("click", begin);
  $("model").addEventListener("change", known);
  $("talks-open").addEventListener("click", () => listed(!document.body.classList.contains("talks")));
  open(stored().find((one) => one.id === sessionStorage.getItem(OPEN)) ?? fresh());
}
