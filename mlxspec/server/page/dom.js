// Nodes of the page. Rule: text becomes text, never markup.

export const $ = (id) => document.getElementById(id);

export function element(parent, tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return parent.appendChild(made);
}

// Fill `node` with what `build` makes, and change only what differs, so that selections, the focus and
// transitions survive an update. Children with a data-key are matched by it.
export function fill(node, build) {
  const made = node.cloneNode(false);
  build(made);
  morph(node, made);
}

function morph(old, made) {
  for (const { name } of [...old.attributes]) if (!made.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of made.attributes) {
    if (old.getAttribute(name) === value) continue;
    if (name === "style") old.style.cssText = value; // the policy forbids the attribute
    else old.setAttribute(name, value);
  }
  const key = (node) => node?.dataset?.key;
  const kept = new Map([...made.children].filter(key).map((child) => [key(child), child]));
  for (const child of [...old.children]) if (key(child) && !kept.has(key(child))) child.remove();
  const known = new Map([...old.children].filter(key).map((child) => [key(child), child]));
  let at = old.firstChild;
  for (const child of [...made.childNodes]) {
    const same = key(child) ? known.get(key(child)) : at;
    if (!same || key(same) !== key(child) || same.nodeName !== child.nodeName) {
      old.insertBefore(child, at);
      continue;
    }
    if (same === at) at = at.nextSibling;
    else old.insertBefore(same, at);
    if (child.nodeType !== Node.TEXT_NODE) morph(same, child);
    else if (same.data !== child.data) same.data = child.data;
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

export function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function button(parent, name, text, label) {
  const made = element(parent, "button", name, text);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  return made;
}

// Copies a text, and says so on the button for a moment. Whether it could.
export async function copy(text, from) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // no permission, or the page came over plain HTTP from another machine
    const field = element(document.body, "textarea", "unseen");
    field.value = text;
    field.select();
    done = document.execCommand("copy");
    field.remove();
    from.focus();
  }
  const said = from.textContent;
  if (said === "Copied") return done;
  from.textContent = done ? "Copied" : "Not copied";
  setTimeout(() => (from.textContent = said), 1500);
  return done;
}

// A question before something that cannot be undone.
export function sure(question, yes) {
  const box = document.getElementById("question");
  put(document.getElementById("question-text"), question);
  put(document.getElementById("question-yes"), yes);
  box.returnValue = "";
  box.showModal();
  return new Promise((resolve) => box.addEventListener("close", () => resolve(box.returnValue === "yes"), { once: true }));
}

// What a browser remembers of this page: a text by name, or null. It may refuse to.
export const memory = {
  read(name) {
    try {
      return JSON.parse(localStorage.getItem(name));
    } catch {
      return null;
    }
  },
  write(name, value) {
    try {
      localStorage.setItem(name, JSON.stringify(value));
      return true;
    } catch {
      return false;
    }
  },
};
