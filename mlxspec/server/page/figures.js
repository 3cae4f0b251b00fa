// The figures of the page: gauges, charts and tables of the snapshots.
// Rule: the server's data becomes text, never markup. Counters only grow; the page shows their differences.

import { SPAN, chart, stack, table } from "./charts.js";
import { $, element, fill, put } from "./dom.js";
import { bytes, count, fixed, percent, rate, seconds } from "./numbers.js";

const RECENT = 10, ACCEPT = 60; // seconds covered by the gauges and the table of drafts
const BRIEF = 3; // of the rate that is shown as the present one
const BANDS = [[1, 1], [2, 2], [3, 3], [4, 4], [5, 6], [7, 8], [9, 12], [13, 16], [17, 99]];
const PRESSURE = ["normal", "short", "very short"];
const STATES = ["writing", "reading", "waiting"]; // decoding, in prefill, queued
const WAITING = 8; // rows of waiting requests; the rest is counted

let history = []; // totals by snapshot, at most SPAN + 1, none from before a reconnect
let points = []; // values of the charts by second, at most SPAN; null without a snapshot
let seen = null; // time of the newest snapshot: the server's clock and ours
let undrawn = null; // the newest snapshot, until the browser draws it
let drawn = null; // the newest that it drew

const sum = (list, of) => list.reduce((total, one) => total + of(one), 0);

// The counters of a snapshot, summed over all models.
function totals(now) {
  const all = (name) => sum(now.models, (m) => m.stats[name]);
  const drafts = new Map();
  for (const m of now.models)
    for (const [source, position, tried, kept] of m.stats.drafts) {
      const key = `${source} ${position}`, at = drafts.get(key) ?? { source, position, tried: 0, kept: 0 };
      drafts.set(key, { source, position, tried: at.tried + tried, kept: at.kept + kept });
    }
  const depths = sum([...drafts.values()], (one) => one.tried);
  const names = ["generated_tokens", "prompt_tokens", "cached_tokens", "rounds", "running", "waiting", "prompt_left"];
  return { time: now.time, drafts, depths, ...Object.fromEntries(names.map((name) => [name, all(name)])) };
}

// Differences over the last `span` seconds, or since the page connected; null before the second snapshot.
function since(span) {
  const last = history.at(-1);
  let first = null;
  for (let i = history.length - 2; i >= 0 && last.time - history[i].time <= span + 0.5; i--)
    first = history[i];
  return first && difference(last, first);
}

function difference(last, first) {
  const made = { time: last.time - first.time, drafts: [] };
  for (const name of ["generated_tokens", "prompt_tokens", "cached_tokens", "rounds", "depths"])
    made[name] = last[name] - first[name];
  for (const [key, { source, position, tried, kept }] of last.drafts) {
    const old = first.drafts.get(key) ?? { tried: 0, kept: 0 };
    made.drafts.push({ source, position, tried: tried - old.tried, kept: kept - old.kept });
  }
  return made;
}

const EMPTY = { time: 0, drafts: new Map(), generated_tokens: 0, prompt_tokens: 0, cached_tokens: 0, rounds: 0, depths: 0 };

// ---- drawing ---------------------------------------------------------------------------------------------

const draw = {
  generated: chart($("charts"), "Tokens/s", [""], rate),
  prompt: chart($("charts"), "Prompt tokens/s", ["read", "cached"], rate),
  round: chart($("charts"), "Tokens/round", [""], fixed),
  depth: chart($("charts"), "Draft depth", [""], fixed),
  queue: chart($("charts"), "Requests", ["running", "waiting"], count),
  footprint: chart($("charts"), "Memory, GB", [""], fixed),
};

// A snapshot in: its totals now, the page's figures when the browser draws next.
export function show(now) {
  const last = totals(now);
  if (history.length && (last.time <= history.at(-1).time || last.rounds < history.at(-1).rounds)) history = []; // another process
  const before = history.at(-1);
  history.push(last);
  history = history.slice(-SPAN - 1);
  const step = before ? difference(last, before) : null;
  const brief = last.running ? since(BRIEF) : step; // a slow round may take longer than a second
  const point = {
    generated: step && step.generated_tokens / step.time,
    prompt: step && step.prompt_tokens / step.time,
    cached: step && step.cached_tokens / step.time,
    round: brief && brief.rounds > 0 ? brief.generated_tokens / brief.rounds : null,
    depth: brief && brief.rounds > 0 ? brief.depths / brief.rounds : null,
    running: last.running,
    waiting: last.waiting,
    footprint: now.process.footprint_bytes / 2 ** 30,
  };
  const mine = Date.now() / 1000, passed = !seen ? 1 : last.time > seen.time ? last.time - seen.time : mine - seen.mine;
  const missed = Math.min(SPAN, Math.max(0, Math.round(passed) - 1)); // seconds without a snapshot
  points.push(...Array(missed).fill(before ? point : null), point);
  points = points.slice(-SPAN);
  seen = { time: last.time, mine };
  if (!undrawn) requestAnimationFrame(render); // not called in a hidden tab
  undrawn = [now, last];
}

function render() {
  const [now, last] = undrawn;
  undrawn = null;
  if (last !== history.at(-1)) return; // the connection was lost
  drawn = now;
  gauges(now, last);
  lines();
  accepted(last);
  blocks(now);
  memory(now);
  requests(now);
  kernels(now);
}

// Tokens per second as the page shows them: "" before the second snapshot.
export function presentRate() {
  const brief = since(BRIEF);
  return brief ? rate(brief.generated_tokens / brief.time) : "";
}

// There is no connection: what was running may run or not.
export function lost() {
  history = [];
  if (!drawn) return;
  for (const name of ["rate", "running"]) gauge(name, "–", "not known");
  requests({ ...drawn, requests: drawn.requests.map((r) => (r.outcome ? r : { ...r, outcome: "not known" })) });
  drawn = null;
}

export function resized() {
  if (points.length) lines();
}

function gauge(name, value, sub) {
  put($(`g-${name}`), value);
  put($(`g-${name}-sub`), sub);
}

function gauges(now, last) {
  const recent = since(RECENT), ever = difference(last, EMPTY);
  const [over, of] = recent?.rounds > 0 ? [recent, `last ${RECENT} s`] : [ever, "since the start"];
  const tried = sum(over.drafts, (d) => d.tried), kept = sum(over.drafts, (d) => d.kept);
  const used = over.rounds > 0;
  gauge("rate", presentRate() || "–", `${count(last.generated_tokens)} in total`);
  gauge("round", used ? fixed(over.generated_tokens / over.rounds) : "–", used ? of : "none yet");
  gauge("kept", percent(kept, tried), tried ? of : "nothing drafted");
  gauge("depth", used ? fixed(over.depths / over.rounds) : "–", used ? of : "none yet");
  const left = last.prompt_left ? `, ${count(last.prompt_left)} tokens to read` : "";
  gauge("running", count(last.running), `${count(last.waiting)} waiting${left}`);
  const seen = last.cached_tokens + last.prompt_tokens;
  gauge("hits", percent(last.cached_tokens, seen), `${count(last.cached_tokens)} of ${count(seen)}`);
}

function lines() {
  const of = (name) => points.map((p) => p && p[name]);
  const at = (name) => points.at(-1)[name];
  const one = (name) => draw[name]([of(name)], [at(name)]);
  draw.generated([of("generated")], [presentRate() ? Number(presentRate().replaceAll(",", "")) : null]);
  draw.prompt([of("prompt"), of("cached")], [at("prompt"), at("cached")]);
  one("round");
  one("depth");
  draw.queue([of("running"), of("waiting")], [at("running"), at("waiting")]);
  one("footprint");
}

function accepted(last) {
  const recent = since(ACCEPT), used = recent && recent.drafts.some((d) => d.tried > 0);
  const drafts = (used ? recent : difference(last, EMPTY)).drafts.filter((d) => d.tried > 0);
  put($("accept-span"), used ? `last ${ACCEPT} s` : "since the start");
  const sources = [...new Set(drafts.map((d) => d.source))].sort();
  const bands = BANDS.filter(([from]) => drafts.some((d) => d.position >= from));
  const head = [["Source", "name"], ...bands.map(([a, b]) => [a === b ? `${a}` : b > 90 ? `${a}+` : `${a}–${b}`, "cell"])];
  const rows = sources.map((source) => [
    source || "other",
    ...bands.map(([from, to]) => {
      const some = drafts.filter((d) => d.source === source && d.position >= from && d.position <= to);
      const tried = sum(some, (d) => d.tried), kept = sum(some, (d) => d.kept);
      return (cell) => {
        if (!tried) return;
        cell.textContent = Math.round((100 * kept) / tried);
        cell.title = `${count(kept)} of ${count(tried)} kept`;
        element(cell, "span", "unseen", ` %, ${cell.title}`);
        cell.style.setProperty("--heat", (kept / tried).toFixed(2));
        cell.classList.add("heat");
      };
    }),
  ]);
  table($("accept"), head, rows, "Nothing was drafted yet. Drafts come where text repeats itself.");
}

const blocks = (now) => fill($("blocks"), (box) => pools(box, now));

function pools(box, now) {
  const pools = now.models.filter((m) => m.status === "loaded");
  for (const m of pools) {
    const s = m.stats, all = s.blocks_used + s.blocks_cached + s.blocks_free;
    if (now.models.length > 1) element(box, "h3", "", m.info.name);
    const parts = ["used", "cached", "free"].map((name) => [name, s[`blocks_${name}`], count(s[`blocks_${name}`])]);
    const said = parts.map(([name, , text]) => `${text} ${name}`).join(", ");
    stack(box, parts, all, `KV blocks of ${m.info.name}: ${said}`);
    const more = s.preemptions ? `; ${count(s.preemptions)} preemptions` : "";
    const size = `${count(all)} blocks of ${m.info.block_size} tokens, ${bytes(m.info.kv_bytes)}${more}`;
    element(box, "p", "sub", size);
  }
  if (!pools.length) element(box, "p", "empty", "No model is loaded.");
}

function memory(now) {
  const p = now.process;
  put($("pressure"), PRESSURE[p.memory_pressure] ?? "");
  $("pressure").className = `badge level${p.memory_pressure}`;
  const rest = Math.max(0, p.footprint_bytes - p.mlx_active_bytes - p.mlx_cache_bytes);
  const parts = [["MLX arrays", p.mlx_active_bytes], ["MLX spare", p.mlx_cache_bytes], ["other", rest]];
  const named = parts.map(([name, n]) => [name, n, bytes(n)]);
  const said = named.map(([name, , text]) => `${name} ${text}`).join(", ");
  const disk = p.disk_bytes ? `; ${bytes(p.disk_bytes)} of prompts on disk` : "";
  fill($("memory"), (box) => {
    stack(box, named, sum(parts, ([, n]) => n), `Memory: ${said}`);
    const ranks = p.ranks > 1 ? `; it is one of ${p.ranks} ranks` : "";
    element(box, "p", "sub", `The process holds ${bytes(p.footprint_bytes)}${ranks}${disk}`);
  });
}

function requests(now) {
  const many = now.models.length > 1;
  const refused = Object.entries(now.refused).map(([status, n]) => `${count(n)} × ${status}`);
  const head = [["Request", "name"], ...(many ? [["Model", "model"]] : [])];
  head.push(["Prompt", "n"], ["Cached", "n hit"], ["Out", "n"], ["Tokens/s", "n"]);
  head.push(["Per round", "n far"], ["Kept", "n far"], ["First", "n far"], ["Time", "n"], ["End", "end"]);
  const live = now.requests.filter((r) => !r.outcome), ended = now.requests.slice(live.length);
  live.sort((a, b) => STATES.indexOf(stateOf(a)) - STATES.indexOf(stateOf(b))); // the newest first within each
  const wait = live.filter((r) => stateOf(r) === "waiting").length, hidden = Math.max(0, wait - WAITING);
  const more = [hidden && `${count(hidden)} more wait`, refused.length && `refused: ${refused.join(", ")}`];
  put($("refused"), more.filter(Boolean).join("; "));
  const shown = [...live.slice(0, live.length - hidden), ...ended];
  const rows = shown.map((r) => [
    (cell) => {
      const api = r.id.match(/^[a-z]*[-_]/)?.[0] ?? "";
      element(cell, "span", "far sub", api);
      element(cell, "span", "tiny", r.id.slice(api.length, -6)); // so that search and copy find the whole id
      element(cell, "span", "", r.id.slice(api.length).slice(-6));
      cell.title = r.id;
    },
    ...(many ? [r.model] : []),
    count(r.prompt),
    (cell) => {
      if (!r.outcome && stateOf(r) === "waiting") return void (cell.textContent = "–");
      const bar = element(element(cell, "span", "meter"), "span");
      bar.style.width = `${r.prompt ? (100 * r.cached) / r.prompt : 0}%`;
      element(cell, "span", "", percent(r.cached, r.prompt));
      cell.title = `${count(r.cached)} of ${count(r.prompt)} tokens`;
    },
    count(r.generated),
    r.rate ? rate(r.rate) : "–",
    r.rounds ? fixed(r.generated / r.rounds) : "–",
    percent(r.kept, r.drafted),
    r.first ? seconds(r.first) : "–",
    seconds(r.seconds),
    (cell) => element(cell, "span", `end-${r.outcome.split(",")[0] || "live"}`, r.outcome || progressOf(r)),
  ]);
  table($("requests"), head, rows, "No request came yet.", shown.map((r) => r.id));
}

const stateOf = (r) => (r.first ? "writing" : r.read ? "reading" : "waiting");
const progressOf = (r) => (r.read ? `reading ${percent(r.read, r.prompt)}` : stateOf(r));

function kernels(now) {
  const head = [["Kernel and shape", "name"], ["Version", "end"], ["Rows", "n"], ["Gain by rows", "gain"], ["", "why"]];
  const rows = Object.entries(now.kernels).map(([name, k]) => [
    name,
    (cell) => element(cell, "span", k.variant ? "end-live" : "sub", k.variant || "not used"),
    k.variant ? `${k.least}–${k.most}` : "–",
    Object.entries(k.gains).map(([n, gain]) => `${n}: ${gain.toFixed(2)}×`).join("  "),
    k.reason,
  ]);
  table($("kernels"), head, rows, "None verified on this machine: what MLX brings runs.");
}

