// The pictures of the next message: pasted, dropped or chosen from files.
// Rule: none where the chosen model reads text only; each can be taken out again by mouse and keyboard.

import { $, element, put } from "./dom.js";

const MOST = 8; // of a message
let chosen = []; // { name, url }: the file's name and its content as a data URL

const dataUrl = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });

async function add(files, sees) {
  const images = [...files].filter((file) => file.type.startsWith("image/"));
  if (!images.length) return;
  if (!sees()) return void put($("picture-note"), "this model reads text only");
  put($("picture-note"), images.length + chosen.length > MOST ? `at most ${MOST} images in a message` : "");
  for (const file of images.slice(0, MOST - chosen.length)) chosen.push({ name: file.name || "image", url: await dataUrl(file) });
  show();
}

function show() {
  const box = $("pictures");
  box.replaceChildren();
  for (const picture of chosen) {
    const chip = element(box, "span", "picture");
    thumbnail(chip, picture);
    element(chip, "span", "", picture.name);
    const out = element(chip, "button", "", "Remove");
    out.type = "button";
    out.setAttribute("aria-label", `Remove ${picture.name}`);
    out.addEventListener("click", () => {
      chosen = chosen.filter((each) => each !== picture);
      show();
      $("say").focus();
    });
  }
}

export function thumbnail(parent, { name, url }) {
  const image = element(parent, "img");
  image.src = url;
  image.alt = name;
}

// `sees()`: whether the chosen model sees images.
export function setUpPictures(sees) {
  $("say").addEventListener("paste", (event) => add(event.clipboardData.files, sees));
  $("picture-file").addEventListener("change", (event) => {
    add(event.target.files, sees);
    event.target.value = "";
  });
  $("picture-add").addEventListener("click", () => $("picture-file").click());
  for (const kind of ["dragover", "drop"])
    $("chat").addEventListener(kind, (event) => {
      if (![...event.dataTransfer.types].includes("Files")) return;
      event.preventDefault();
      if (kind === "drop") add(event.dataTransfer.files, sees);
    });
}

// Takes the pictures for a message that is sent; `give` puts them back where it failed.
export function take() {
  const taken = chosen;
  chosen = [];
  put($("picture-note"), "");
  show();
  return taken;
}

export function give(pictures) {
  chosen = [...pictures, ...chosen];
  show();
}
