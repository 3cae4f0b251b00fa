// A chat with one of the served models, streamed from /v1/chat/completions.
// Rule: model output becomes text, never markup. The conversation is kept in this tab only.

import { element, put } from "./charts.js";
import { give, setUpPictures, take, thumbnail } from "./pictures.js";

const $ = (id) => document.getElementById(id);
const talk = []; // messages in the API's format
let running = null; // the AbortController of the running answer

// Server-sent events of a response, each event's data as it comes.
async function* dataOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let rest = ""; ; ) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks)
        for (const line of block.split("\n")) if (line.startsWith("data: ")) yield line.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// The message of an error response.
export async function complaint(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

function turn(role, text, pictures = []) {
  const made = element($("log"), "div", `turn ${role}`);
  element(made, "span", "who", { user: "You", assistant: "Model", error: "Error" }[role]);
  const body = element(made, "div", "body", text);
  for (const picture of pictures) thumbnail(made, picture);
  follow(true);
  return { made, body };
}

// Stay at the end of the log, unless the user has scrolled up.
function follow(always) {
  const log = $("log");
  if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 60) log.scrollTop = log.scrollHeight;
}

function busy(on) {
  $("send").hidden = on;
  $("stop").hidden = !on;
  $("log").setAttribute("aria-busy", on);
}

// `headers()` makes a request's headers, `onLocked()` is called when the API key was refused, `loading()` is the
// name of the model that is loading, `sees()`: whether the chosen model sees images.
export function setUp(headers, onLocked, loading, sees) {
  setUpPictures(sees);
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask(headers, onLocked, loading);
  });
  $("say").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("ask").requestSubmit();
  });
  $("chat").addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
  $("stop").addEventListener("click", () => running?.abort());
  $("clear").addEventListener("click", () => {
    running?.abort();
    talk.length = 0;
    $("log").replaceChildren();
    $("say").focus();
  });
}

async function ask(headers, onLocked, loading) {
  const text = $("say").value.trim();
  if (running) return;
  const pictures = take();
  if (!text && !pictures.length) return;
  $("say").value = "";
  const mine = turn("user", text, pictures), answer = turn("assistant", "");
  answer.made.classList.add("coming");
  const control = (running = new AbortController());
  const parts = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  const content = parts.length ? [...parts, { type: "text", text }] : text;
  const messages = [...talk, { role: "user", content }];
  const found = { text: "", thought: null, usage: null, read: "", began: performance.now(), first: 0 };
  let wrong = "";
  busy(true);
  const waits = element(answer.made, "div", "sub waits");
  const told = setInterval(() => put(waits, found.first ? "" : loading() ? `loading ${loading()} first` : found.read), 250);
  try {
    const body = { model: $("model").value || undefined, messages, stream: true };
    body.stream_options = { include_usage: true, include_progress: true };
    const options = { method: "POST", headers: headers(), body: JSON.stringify(body), signal: control.signal };
    const response = await fetch("/v1/chat/completions", options);
    if (response.ok) wrong = await read(response, answer, found);
    else if (response.status !== 401) wrong = await complaint(response);
    else {
      wrong = "the server asks for its API key: enter it above, then send this again";
      onLocked();
    }
  } catch (error) {
    if (!control.signal.aborted) wrong = `the connection failed: ${error.message}`;
  }
  running = null;
  clearInterval(told);
  waits.remove();
  busy(false);
  if (document.activeElement === document.body) $("say").focus(); // the button with the focus is hidden
  if (!answer.made.isConnected) return; // cleared meanwhile
  answer.made.classList.remove("coming");
  if (found.text) talk.push(messages.at(-1), { role: "assistant", content: found.text });
  if (found.text || found.thought) {
    element(answer.made, "div", "sub", summary(found, control.signal.aborted));
  } else {
    answer.made.remove();
    if (wrong || control.signal.aborted) {
      mine.made.remove();
      if (!$("say").value) $("say").value = text;
      give(pictures);
    } else wrong = "the model returned an empty answer";
  }
  if (wrong) turn("error", wrong);
  follow();
}

// Reads an answer into `found` and the page. Returns the error, or "".
async function read(response, answer, found) {
  for await (const data of dataOf(response)) {
    if (data === "[DONE]") break;
    const said = JSON.parse(data);
    if (said.error) return said.error.message;
    if (said.usage) found.usage = said.usage;
    const progress = said.prompt_progress;
    if (progress) found.read = `${progress.processed} of ${progress.total} prompt tokens read`;
    const { content, reasoning_content: thought } = said.choices?.[0]?.delta ?? {};
    if (content || thought) found.first ||= performance.now();
    if (thought) {
      if (!found.thought) answer.body.before((found.thought = element(answer.made, "div", "thought")));
      found.thought.append(thought);
    }
    if (content) {
      found.text += content;
      answer.body.append(content);
    }
    follow();
  }
  return "";
}

function summary({ usage, began, first }, stopped) {
  if (!usage) return stopped ? "stopped" : "";
  const seconds = (performance.now() - first) / 1000, tokens = usage.completion_tokens;
  const rate = tokens > 1 && seconds > 0.05 ? `, ${((tokens - 1) / seconds).toFixed(1)}/s` : "";
  const kept = usage.completion_tokens_details?.accepted_prediction_tokens ?? 0;
  const hit = usage.prompt_tokens_details?.cached_tokens ?? 0;
  return (
    `${tokens} tokens${rate}, first after ${((first - began) / 1000).toFixed(2)} s; ` +
    `${hit} of ${usage.prompt_tokens} prompt tokens cached` + (kept ? `, ${kept} drafted ahead` : "")
  );
}
