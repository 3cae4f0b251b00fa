// The models: load, unload, fetch from the hub, delete.
// Rule: nothing is asked of the hub before a button is pressed, and nothing deleted before a question.

import { lines, send } from "./api.js";
import { $, button, element, fill, put, sure } from "./dom.js";
import { bytes, count, percent } from "./numbers.js";

let served = []; // the models of the last snapshot
let disk = null; // of /page/disk, once it was asked
let busy = new Map(); // what is being done with a model, by its name
let found = null; // what the hub said of the model to fetch
let fetching = null; // the AbortController of a download
let usedInChat = () => {};

const OPEN = () => document.body.dataset.view === "models";
const note = (text) => put($("models-note"), text);

// ---- lists

export function showModels(now) {
  served = now.models;
  if (OPEN() && !disk) refresh();
  drawServed();
}

function act(parent, what, name, text) {
  const made = button(parent, what, text, `${text} ${name}`);
  made.dataset.act = what;
  made.dataset.name = name;
}

function drawServed() {
  fill($("served"), (box) => {
    for (const m of served) {
      const name = m.info.name, entry = element(box, "li", "");
      entry.dataset.key = name;
      const head = element(entry, "div", "head");
      element(head, "b", "", name);
      element(head, "span", `status ${m.status}`, m.status + (m.pinned ? ", pinned" : ""));
      const facts = [`${count(m.info.context)} tokens of context`, `${bytes(m.info.weight_bytes)} of weights`];
      facts.push(m.info.sees && "sees images", `layout ${m.info.layout}`, m.info.exact);
      element(entry, "p", "sub", m.error || facts.filter(Boolean).join(", "));
      const tools = element(entry, "div", "tools");
      if (busy.has(name)) element(tools, "span", "sub", busy.get(name));
      else if (m.status === "unloaded") act(tools, "load", name, "Load");
      else if (m.status === "loaded" && !m.pinned) act(tools, "unload", name, "Unload");
      if (!busy.has(name)) act(tools, "use", name, "Chat");
    }
  });
}

function drawDisk() {
  const names = new Set(served.map((m) => m.info.name));
  fill($("disk"), (box) => {
    for (const one of disk?.models ?? []) {
      const entry = element(box, "li", "");
      entry.dataset.key = one.name;
      element(element(entry, "div", "head"), "b", "", one.name);
      const facts = [bytes(one.bytes), fits(one.bytes), names.has(one.name) && "served", !one.deletable && "of another program"];
      element(entry, "p", "sub", facts.filter(Boolean).join(", "));
      const tools = element(entry, "div", "tools");
      if (busy.has(one.name)) element(tools, "span", "sub", busy.get(one.name));
      else {
        if (!names.has(one.name)) act(tools, "serve", one.name, "Serve");
        if (one.deletable) act(tools, "delete", one.name, "Delete");
      }
    }
    if (disk && !disk.models.length) element(box, "li", "empty", "None in the hub's cache or the folders of other programs.");
  });
}

const fits = (size) => (size <= disk.room ? "" : `does not fit: ${bytes(Math.max(0, disk.room))} of memory for weights`);

async function refresh() {
  disk ??= { room: Infinity, models: [] }; // so that it is asked once
  try {
    disk = await (await send("/page/disk")).json();
  } catch (error) {
    disk = error.status === 401 ? null : disk;
    note(error.message);
  }
  drawDisk();
  if (disk?.pulling && !fetching && !busy.size && !$("fetch-note").textContent) put($("fetch-note"), `${disk.pulling} is being fetched for another client.`);
}

// ---- what the buttons do

const ACTS = {
  load: (name) => doing(name, "loading …", () => send("/v1/models/load", { method: "POST", body: { model: name } })),
  unload: (name) => doing(name, "unloading …", () => send("/v1/models/unload", { method: "POST", body: { model: name } })),
  serve: (name) => doing(name, "looking …", () => pull(name, () => {})),
  use: (name) => usedInChat(name),
  async delete(name) {
    const size = disk.models.find((one) => one.name === name)?.bytes ?? 0;
    if (!(await sure(`Delete ${name} from this disk? It frees ${bytes(size)}; other programs lose it, too.`, "Delete"))) return;
    await doing(name, "deleting …", () => send("/api/delete", { method: "DELETE", body: { model: name } }));
  },
};

async function doing(name, text, work) {
  busy.set(name, text);
  note("");
  drawServed();
  drawDisk();
  try {
    await work();
  } catch (error) {
    note(error.message);
  }
  busy.delete(name);
  drawServed();
  await refresh();
}

async function pull(name, report, signal) {
  const response = await send("/api/pull", { method: "POST", body: { model: name }, signal });
  for await (const line of lines(response)) {
    if (line.error) throw new Error(line.error);
    report(line);
  }
}

// ---- fetching

async function look() {
  const name = $("fetch-name").value.trim();
  found = null;
  drawFetch("asking the hub …");
  try {
    const said = await (await send(`/page/disk?model=${encodeURIComponent(name)}`)).json();
    disk = said;
    found = said.hub;
    drawDisk();
    drawFetch("");
  } catch (error) {
    drawFetch(error.message);
  }
}

function drawFetch(text) {
  const here = found?.here ? `, ${percent(found.here, found.bytes)} of it here` : "";
  const size = found && `${found.name}: ${bytes(found.bytes)}${here}. ${fits(found.bytes) || "It fits into memory"}.`;
  put($("fetch-note"), text || size || "");
  $("fetch-go").hidden = !found || Boolean(fetching);
  $("fetch-stop").hidden = $("fetch-bar").hidden = !fetching;
  $("fetch-look").disabled = Boolean(fetching);
}

async function fetchIt() {
  const { name } = found;
  fetching = new AbortController();
  $("fetch-bar").removeAttribute("value");
  drawFetch(`${name}: beginning …`);
  let end = `${name} is here and served.`;
  try {
    await pull(name, ({ total, completed }) => {
      if (!total) return;
      $("fetch-bar").max = total;
      $("fetch-bar").value = completed;
      put($("fetch-note"), `${name}: ${bytes(completed)} of ${bytes(total)}`);
    }, fetching.signal);
    found = null;
  } catch (error) {
    end = fetching.signal.aborted ? "Stopped; files that came whole are kept." : error.message;
  }
  fetching = null;
  drawFetch(end);
  await refresh();
}

// `use(name)` takes a model into the chat.
export function setUpModels(use) {
  usedInChat = use;
  for (const list of ["served", "disk"])
    $(list).addEventListener("click", ({ target }) => ACTS[target.dataset.act]?.(target.dataset.name));
  $("fetch").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!fetching) look();
  });
  $("fetch-name").addEventListener("input", () => {
    found = null;
    if (!fetching) drawFetch("");
  });
  $("fetch-go").addEventListener("click", fetchIt);
  $("fetch-stop").addEventListener("click", () => fetching?.abort());
  window.addEventListener("hashchange", () => OPEN() && refresh());
  window.addEventListener("beforeunload", (event) => fetching && event.preventDefault()); // it ends the download
}
