// The turns of a conversation as they are shown: text, reasoning, pictures, what can be done with each.
// Rule: whoever has scrolled up stays there; whoever was at the end stays at the end.

import { $, button, copy, element, put } from "./dom.js";
import { Writer } from "./markdown.js";
import { thumbnail } from "./pictures.js";

const NEAR = 60; // pixels from the end that count as the end

const atEnd = () => $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < NEAR;

// Runs a change of the log. Whether to follow is decided before it, as one change may add many lines.
export function keepPlace(change) {
  const follows = atEnd();
  change();
  if (follows) toEnd();
}

export const toEnd = () => ($("log").scrollTop = $("log").scrollHeight);

function frame(role, who) {
  const made = element($("log"), "article", `turn ${role}`);
  made.setAttribute("aria-label", who);
  element(made, "span", "who", who).setAttribute("aria-hidden", "true");
  return made;
}

// A message of the user's. `edit()` is called by its button.
export function userTurn(turn, edit) {
  const made = frame("user", "You");
  element(made, "div", "body", turn.content);
  for (const picture of turn.pictures ?? []) thumbnail(made, picture);
  if (turn.lost) element(made, "p", "sub", turn.lost === 1 ? "1 image, not kept" : `${turn.lost} images, not kept`);
  const tools = element(made, "div", "tools");
  copier(tools, () => turn.content);
  button(tools, "edit", "Edit", "Edit this message").addEventListener("click", edit);
  return made;
}

function copier(tools, text) {
  const made = button(tools, "copy", "Copy", "Copy this message");
  made.addEventListener("click", () => copy(text(), made));
}

// Why a message got no answer.
export function errorTurn(text, fresh) {
  const made = frame("error", "Error");
  element(made, "div", "body", text).setAttribute("role", "alert");
  if (fresh) button(made, "", "New chat").addEventListener("click", fresh);
  return made;
}

// An answer, whole or while it comes. `again()` is called by its button.
export class AnswerTurn {
  constructor(again) {
    this.made = frame("assistant", "Model");
    this.body = element(this.made, "div", "body");
    this.writer = new Writer(this.body, keepPlace);
    this.waits = element(this.made, "div", "sub waits");
    this.note = element(this.made, "p", "sub note");
    const tools = element(this.made, "div", "tools");
    copier(tools, () => this.writer.all);
    button(tools, "again", "Regenerate").addEventListener("click", again);
  }

  add(text) {
    this.writer.add(text);
  }

  // Reasoning is folded; its summary says that it goes on, or how long it took.
  think(text) {
    keepPlace(() => {
      if (!this.thought) {
        const fold = element(this.made, "details", "thought");
        this.body.before(fold);
        this.heading = element(fold, "summary", "", "Reasoning …");
        this.thought = element(fold, "div");
      }
      this.thought.append(text);
    });
  }

  thinkingEnds(seconds) {
    if (this.heading) put(this.heading, seconds ? `Reasoning, ${seconds.toFixed(1)} s` : "Reasoning");
  }

  end(note) {
    this.writer.end();
    keepPlace(() => {
      this.waits.remove();
      put(this.note, note);
      this.made.classList.remove("coming");
    });
  }
}

// Buttons inside rendered answers have no listeners of their own.
export function setUpTurns() {
  let follows = true; // of another size, the same lines may be more
  $("log").addEventListener("scroll", () => (follows = atEnd()));
  new ResizeObserver(() => follows && toEnd()).observe($("log"));
  $("log").addEventListener("click", ({ target }) => {
    if (target.classList.contains("copy-code")) copy(target.closest(".code").querySelector("code").textContent, target);
  });
}
