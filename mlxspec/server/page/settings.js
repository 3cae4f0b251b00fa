// The drawer of the chat: system text and sampling, kept in this browser.

import { $, memory, put } from "./dom.js";

const NAME = "mlxspec-settings";
const NUMBERS = { temperature: "temperature", top_p: "top-p", max_tokens: "max-tokens" }; // fields by the API's names
const FIELDS = ["system", ...Object.values(NUMBERS), "thinking"];

const values = () => Object.fromEntries(FIELDS.map((id) => [id, $(id).value]));

// What the drawer adds to a request: the system's message, and fields of the body.
export function settings() {
  const now = values(), body = {};
  for (const [name, id] of Object.entries(NUMBERS)) if (now[id] !== "") body[name] = Number(now[id]);
  if (now.thinking) body.chat_template_kwargs = { enable_thinking: now.thinking === "on" };
  return { first: now.system.trim() ? [{ role: "system", content: now.system.trim() }] : [], body };
}

// What is wrong with a field, or "".
export function fault() {
  const wrong = FIELDS.map($).find((field) => !field.checkValidity());
  if (!wrong) return "";
  open(true);
  wrong.focus();
  return `${wrong.labels[0].firstChild.textContent.trim()}: ${wrong.validationMessage}`;
}

function open(on) {
  $("tune").hidden = !on;
  $("tune-open").setAttribute("aria-expanded", on);
}

function changed() {
  const set = Object.values(values()).filter(Boolean).length;
  memory.write(NAME, values());
  put($("tune-open"), set ? `Settings (${set})` : "Settings");
}

export function setUpSettings() {
  const before = memory.read(NAME) ?? {};
  for (const id of FIELDS) $(id).value = before[id] ?? "";
  if (Object.values(before).some(Boolean)) changed();
  $("tune").addEventListener("input", changed);
  $("tune-open").addEventListener("click", () => open($("tune").hidden));
  $("tune-reset").addEventListener("click", () => {
    for (const id of FIELDS) $(id).value = "";
    changed();
  });
}
