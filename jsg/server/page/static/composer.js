// The box in which a turn is written, with the pictures that go with it.

import { button, freshId, h, replace } from "./dom.js";

const BLIND = "The served model reads text only, so pictures cannot be sent to it.";
const OTHER_FILE = "Only pictures can be sent, but another file was among them.";

/** The box, and what the chat does with it. */
export function makeComposer(chat) {
  const id = freshId("compose");
  const pictures = [];
  const shown = h("ul", { class: "attached", "aria-label": "Pictures to send" });
  const listeners = { input: grow, keydown: onKey, paste: onPaste };
  const text = h("textarea", { id, rows: 2, placeholder: "Write a message", ...listeners });
  const kinds = { type: "file", accept: "image/*", multiple: true };
  const file = h("input", { ...kinds, class: "unseen", id: freshId("file"), change: onChoice });
  const attach = h("span", { class: "attach" }, file, h("label", { for: file.id }, "Add pictures"));
  const main = h("button", { class: "main" }, "Send");
  const element = h(
    "form",
    { class: "composer", submit: onSubmit },
    h("label", { class: "unseen", for: id }, "Message"),
    shown,
    text,
    h("div", { class: "row" }, attach, h("span", { class: "gap" }), main),
  );

  function canSee() {
    return chat.app.model?.modalities.includes("image") ?? false;
  }

  function draw() {
    main.textContent = chat.isRunning ? "Stop" : "Send";
    attach.hidden = !canSee();
    replace(shown, pictures.map(({ url, name }, index) => {
      const remove = () => {
        pictures.splice(index, 1);
        draw();
      };
      const cross = button("×", remove, { "aria-label": `Remove ${name}` });
      return h("li", {}, h("img", { src: url, alt: "" }), h("span", {}, name), cross);
    }));
  }

  function onSubmit(event) {
    event.preventDefault();
    if (chat.isRunning) {
      chat.stop();
      return;
    }
    if (text.value.trim() === "" && pictures.length === 0) return;
    const fields = { text: text.value, images: pictures.splice(0) };
    text.value = "";
    grow();
    text.focus();
    chat.send(fields);
  }

  function onKey(event) {
    if (event.key === "Escape" && chat.isRunning) chat.stop();
    // While an input method composes a character, Enter belongs to it.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!chat.isRunning) element.requestSubmit();
  }

  function onPaste(event) {
    if (event.clipboardData.files.length === 0) return;
    event.preventDefault();
    take(event.clipboardData.files);
  }

  function onChoice() {
    take(file.files);
    file.value = "";
  }

  async function take(files) {
    if (!canSee()) {
      chat.app.showError(new Error(BLIND));
      return;
    }
    const images = [...files].filter((each) => each.type.startsWith("image/"));
    if (images.length < files.length) chat.app.showError(new Error(OTHER_FILE));
    for (const image of images) pictures.push({ url: await dataUrl(image), name: image.name });
    draw();
    if (images.length) chat.app.announce(`${images.length} pictures added`);
  }

  function grow() {
    text.rows = Math.min(10, Math.max(2, text.value.split("\n").length));
  }

  /** Takes files that are dropped anywhere on an element. */
  function takeFilesFrom(target) {
    target.addEventListener("dragover", (event) => event.preventDefault());
    target.addEventListener("drop", (event) => {
      event.preventDefault();
      if (event.dataTransfer.files.length) take(event.dataTransfer.files);
    });
  }

  return { element, draw, takeFilesFrom, focus: () => text.focus() };
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
