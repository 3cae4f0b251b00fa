// Markdown of an answer as nodes, while it comes.
// Rule: the library only finds the parts; each becomes an element made here, with its text as text. Raw HTML
// is text, and a link leads to the web or to an address of mail, or is none.

import { button, element, fill } from "./dom.js";
import { Lexer } from "./vendor/marked.esm.js";

const DEEPEST = 24; // nested lists and quotes; what lies deeper is shown as it was written
const SLOW_MS = 250; // of one parse; the rest of such an answer is plain text
const STEP = 4096; // characters of a long text that are parsed at a time, so that a slow one is found out early
const SHARE = 32; // parse again when the open part has grown by one of so many parts
const BLOCKS = new Set(["P", "UL", "OL", "LI", "BLOCKQUOTE", "H3", "H4", "H5", "H6"]);
const LINK = /^(https?|mailto):/i;
const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", reg: "®", deg: "°" };
Object.assign(NAMED, { times: "×", middot: "·", hellip: "…", mdash: "—", ndash: "–", rarr: "→", larr: "←", bull: "•" });

export const work = { parsed: 0 }; // characters that were parsed since the page was loaded

function entities(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|(\w{2,8}));/gi, (whole, ten, hex, name) => {
    if (name) return NAMED[name] ?? whole;
    const code = ten ? Number(ten) : parseInt(hex, 16);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : whole;
  });
}

function blocks(parent, tokens, depth = 0) {
  for (const token of tokens) block(parent, token, depth);
}

function block(parent, token, depth) {
  if (depth > DEEPEST) return void element(parent, "p", "plain", token.raw);
  switch (token.type) {
    case "space":
    case "def":
      return;
    case "heading":
      return inline(element(parent, `h${Math.min(6, token.depth + 2)}`), token.tokens, depth);
    case "code":
      return code(parent, token);
    case "blockquote":
      return blocks(element(parent, "blockquote"), token.tokens, depth + 1);
    case "list":
      return list(parent, token, depth);
    case "table":
      return table(parent, token, depth);
    case "hr":
      return void element(parent, "hr");
    case "html":
      return void element(parent, "p", "plain", token.raw.replace(/\n+$/, ""));
    default: // a paragraph, or the text of an item
      return inline(parent.tagName === "LI" && token.type === "text" ? parent : element(parent, "p"), token.tokens ?? [token], depth);
  }
}

function list(parent, token, depth) {
  const made = element(parent, token.ordered ? "ol" : "ul");
  if (token.ordered && token.start !== 1) made.start = token.start;
  for (const item of token.items) {
    const entry = element(made, "li", item.task ? "task" : "");
    if (item.task) {
      const box = element(entry, "input");
      box.type = "checkbox";
      box.disabled = true;
      box.toggleAttribute("checked", Boolean(item.checked));
    }
    blocks(entry, item.tokens.filter((one) => one.type !== "checkbox"), depth + 1);
  }
}

function table(parent, token, depth) {
  const box = element(parent, "div", "scroll");
  box.tabIndex = 0;
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", "Table");
  const made = element(box, "table");
  const row = (part, cells, tag) => {
    const line = element(part, "tr");
    cells.forEach((cell, n) => inline(element(line, tag, token.align[n] ? `to-${token.align[n]}` : ""), cell.tokens, depth));
  };
  row(element(made, "thead"), token.header, "th");
  const body = element(made, "tbody");
  for (const cells of token.rows) row(body, cells, "td");
}

function code(parent, token) {
  const box = element(parent, "div", "code"), head = element(box, "div", "code-head");
  const language = (token.lang ?? "").split(/\s/)[0].slice(0, 30);
  element(head, "span", "", language || "text");
  button(head, "copy-code", "Copy", "Copy this code");
  const pre = element(box, "pre");
  pre.tabIndex = 0; // to scroll it by keyboard
  element(pre, "code", "", token.text);
}

function inline(parent, tokens, depth) {
  for (const token of tokens) span(parent, token, depth);
}

function span(parent, token, depth) {
  const inner = token.tokens ?? [];
  if (depth > DEEPEST) return void parent.append(token.raw);
  switch (token.type) {
    case "strong":
    case "em":
    case "del":
      return inline(element(parent, token.type), inner, depth + 1);
    case "codespan":
      return void element(parent, "code", "", token.text);
    case "br":
      return void element(parent, "br");
    case "link":
    case "image":
      return link(parent, token, depth);
    case "escape":
      return void parent.append(token.text);
    case "html":
      return void parent.append(token.raw);
    case "text":
      if (inner.length) return inline(parent, inner, depth + 1);
  }
  parent.append(entities(token.text ?? token.raw));
}

// A link, also to an image: nothing is loaded before it is followed.
function link(parent, token, depth) {
  let url = null;
  try {
    url = LINK.test(token.href) ? new URL(token.href) : null;
  } catch {} // no URL
  if (!url) return void parent.append(token.raw);
  const made = element(parent, "a");
  made.href = made.title = url.href;
  made.target = "_blank";
  made.rel = "noopener noreferrer nofollow";
  if (token.type === "image") made.textContent = `image: ${token.text || url.href}`;
  else inline(made, token.tokens, depth + 1);
}

// Writes an answer into `box` piece by piece. Blocks that no later text can change are parsed once; the open
// rest again when it has grown by a part of its length, and shown as it came meanwhile. So the characters
// parsed for an answer are at most some SHARE times its own. `around(change)` runs each change of the page.
export class Writer {
  constructor(box, around = (change) => change()) {
    Object.assign(this, { box, around, all: "", open: "", seen: 0, parsed: 0, plain: false, frame: 0 });
    this.tail = element(box, "div", "tail");
  }

  add(piece) {
    for (let at = 0; at < piece.length; at += STEP) {
      const part = piece.slice(at, at + STEP);
      this.all += part;
      this.open += part;
      if (piece.length > STEP) this.draw(false);
    }
    this.frame ||= requestAnimationFrame(() => this.draw(false));
  }

  end() {
    cancelAnimationFrame(this.frame);
    if (/^ {0,3}\[[^\]]+\]:/m.test(this.all)) { // the target of links anywhere before it
      this.open = this.all;
      this.tail.remove();
      this.box.replaceChildren(this.tail);
    }
    this.draw(true);
  }

  draw(last) {
    this.frame = 0;
    this.around(() => {
      const grown = this.open.length - this.parsed;
      if (this.plain || (!last && grown * SHARE < this.open.length)) this.append(this.open.slice(this.seen));
      else this.parse();
      this.seen = this.open.length;
    });
  }

  append(text) {
    let at = this.tail;
    while (BLOCKS.has(at.lastElementChild?.tagName)) at = at.lastElementChild;
    (at.lastElementChild?.classList.contains("code") ? at.lastElementChild.querySelector("code") : at).append(text);
  }

  parse() {
    this.open = this.open.replace(/\r\n?/g, "\n");
    work.parsed += this.open.length;
    const began = performance.now();
    let tokens, slow = true;
    try {
      tokens = new Lexer({ gfm: true, breaks: true }).lex(this.open);
      slow = performance.now() - began > SLOW_MS;
      if (!slow) fill(this.tail, (made) => blocks(made, tokens));
    } catch { // nested too deeply for the stack
      slow = true;
    }
    if (slow) {
      this.plain = true;
      this.tail.classList.add("plain");
      this.tail.textContent = this.open;
      return;
    }
    this.settle(tokens);
    this.parsed = this.open.length;
  }

  // All but the last block stays as it is, however the text goes on.
  settle(tokens) {
    const last = tokens.findLastIndex((token) => token.type !== "space" && token.type !== "def");
    const rest = tokens.slice(Math.max(0, last)).map((token) => token.raw).join("");
    if (last <= 0 || !this.open.endsWith(rest)) return;
    while (this.tail.children.length > 1) this.box.insertBefore(this.tail.firstElementChild, this.tail);
    this.open = rest;
  }
}
