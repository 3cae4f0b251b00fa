// The conversations that this browser keeps, and the list to choose from.
// Rule: bounded: the newest ones, so many bytes; pictures are not kept. No key is.

import { $, button, element, fill, memory, sure } from "./dom.js";

const NAME = "mlxspec-chats";
const MOST = 50, BYTES = 1_500_000; // conversations, and characters of all of them
const TITLE = 60;

export const stored = () => (memory.read(NAME) ?? []).filter((one) => one?.id && Array.isArray(one.turns));
let current = ""; // the id of the open one

export const fresh = () => ({ id: crypto.getRandomValues(new Uint32Array(3)).join(""), title: "", when: 0, turns: [] });

// What is kept of a turn: `lost` counts its pictures.
const kept = ({ pictures, ...turn }) => (pictures?.length ? { ...turn, lost: pictures.length } : turn);

// Keeps a conversation as the newest; without turns it is deleted. False if it is too long to keep.
export function keep(talk) {
  talk.when = Date.now();
  talk.title ||= (talk.turns[0]?.content || "A picture").trim().slice(0, TITLE).split("\n")[0];
  const entry = { ...talk, turns: talk.turns.map(kept) };
  // Another tab may have kept some meanwhile.
  let all = [...(talk.turns.length ? [entry] : []), ...stored().filter((one) => one.id !== talk.id)].slice(0, MOST);
  let size = 0;
  all = all.filter((one) => {
    const more = JSON.stringify(one).length, fits = size + more <= BYTES;
    size += fits ? more : 0;
    return fits;
  });
  while (!memory.write(NAME, all) && all.length) all.pop(); // other pages of this origin take room, too
  list();
  return !talk.turns.length || all[0]?.id === talk.id;
}


export function choose(id) {
  current = id;
  list();
}

function list() {
  const all = stored();
  $("talks-clear").hidden = !all.length;
  fill($("talks-list"), (box) => {
    for (const talk of all) {
      const entry = element(box, "li", "");
      entry.dataset.key = talk.id;
      const open = button(entry, "open", talk.title || "Untitled");
      open.dataset.open = talk.id;
      open.title = new Date(talk.when).toLocaleString();
      if (talk.id === current) open.setAttribute("aria-current", "true");
      button(entry, "drop", "×", `Delete ${talk.title}`).dataset.drop = talk.id;
    }
    if (!all.length) element(box, "li", "empty", "None yet. They stay in this browser.");
  });
}

// `opened(talk)` shows a conversation, `gone()` is called when the open one was deleted.
export function setUpConversations(opened, gone) {
  const drop = (some) => {
    memory.write(NAME, stored().filter((one) => !some(one.id)));
    list();
    if (some(current)) gone();
  };
  $("talks-list").addEventListener("click", async ({ target }) => {
    const { open, drop: id } = target.dataset;
    if (open) opened(stored().find((one) => one.id === open) ?? fresh());
    if (id && (await sure("Delete this conversation?", "Delete"))) drop((one) => one === id);
  });
  $("talks-clear").addEventListener("click", async () => {
    if (await sure("Delete all conversations of this browser?", "Delete all")) drop(() => true);
  });
  addEventListener("storage", (event) => event.key === NAME && list());
  list();
}
