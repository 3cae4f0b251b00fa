// The page: a snapshot a second in, its parts told of it; the API key; which view is open.

import { OFFLINE, Refused, key, send } from "./api.js";
import { know, pickModel, setUpChat, unlocked } from "./chat.js";
import { $, copy, put } from "./dom.js";
import { lost, presentRate, resized, show } from "./figures.js";
import { setUpModels, showModels } from "./models.js";

const VIEWS = ["chat", "server", "models"];
const WIDE = matchMedia("(min-width: 1080px)"); // as in page.css: the chat is beside the other views

// ---- views

function choose() {
  const named = location.hash.slice(1);
  const view = VIEWS.includes(named) ? named : named === "say" ? (WIDE.matches ? document.body.dataset.view : "chat") : WIDE.matches ? "server" : "chat";
  document.body.dataset.view = view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (named === "say") $("say").focus();
  if (view === "server") resized();
}

// ---- the connection

let trouble = ""; // what the server says is wrong

function link(state, text) {
  document.body.dataset.link = state;
  put($("link-text"), text);
  put($("said"), text.replace(/\d+ s\b/g, "a while")); // a screen reader would read it out every second
}

function told(now) {
  show(now);
  know(now);
  showModels(now);
  put($("version"), now.version);
  put($("note"), now.note);
  trouble = now.unwell || (now.loading ? `loading ${now.loading}` : "");
  link(trouble ? "trouble" : "live", trouble || "live");
  const loaded = now.models.filter((m) => m.status === "loaded").map((m) => m.info.name);
  put($("serving"), loaded.join(", ") || "no model loaded");
  const busy = now.models.some((m) => m.stats.running);
  document.title = busy && presentRate() ? `${presentRate()} tokens/s · mlxspec` : "mlxspec";
}

let accepted = () => {}, entered = false;

function lock() {
  const had = key.get();
  key.forget();
  put($("key-note"), had ? "The server refused this key." : "");
  if ($("key").hidden) {
    $("key").hidden = false;
    $("key-field").focus();
  }
  link("locked", "needs a key");
  document.title = "locked · mlxspec";
}

$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("key-field").value.trim();
  if (!text || /[\0-\x1f\x7f]/.test(text)) {
    put($("key-note"), text ? "There is a control character in this key; no header can carry it." : "The key is empty.");
    return;
  }
  key.set(text);
  $("key-field").value = "";
  $("key").hidden = entered = true;
  accepted();
});

// Shows a snapshot; else returns why there is none, for the user.
async function ask() {
  let response;
  try {
    response = await send("/page/now", { signal: AbortSignal.timeout(10_000) });
  } catch (error) {
    if (error.status !== 401) return error instanceof Refused ? error.message : OFFLINE;
    const wait = new Promise((resolve) => (accepted = resolve));
    lock();
    lost();
    await wait;
    return ask();
  }
  const now = await response.json();
  const at = document.activeElement; // may be in a form that is now hidden
  if (entered && (at === document.body || $("key").contains(at))) $("say").focus();
  if (entered) unlocked();
  entered = false;
  told(now);
  return "";
}

async function keep() {
  for (let pause = 1; ; ) {
    const why = await ask().catch(() => OFFLINE);
    pause = why ? Math.min(10, pause * 2) : 1;
    if (why) {
      lost();
      link("off", `${why}; trying again`);
      document.title = "offline · mlxspec";
    }
    await new Promise((resolve) => setTimeout(resolve, 1000 * pause));
  }
}

// ---- how programs reach the server

function addresses() {
  const flag = location.host === "127.0.0.1:8080" ? "" : `--url ${location.origin} `;
  const said = { openai: `${location.origin}/v1`, anthropic: location.origin, ollama: location.origin };
  for (const name of ["claude", "codex", "opencode"]) said[name] = `mlxspec launch ${flag}${name}`;
  for (const row of document.querySelectorAll("[data-address]")) {
    const text = said[row.dataset.address], button = row.querySelector("button");
    put(row.querySelector("code"), text);
    button.addEventListener("click", () => copy(text, button));
  }
}

addresses();
setUpChat(lock);
setUpModels((name) => {
  pickModel(name);
  if (!WIDE.matches) location.hash = "chat";
});
choose();
window.addEventListener("hashchange", choose);
WIDE.addEventListener("change", choose);
window.addEventListener("resize", resized);
keep();
