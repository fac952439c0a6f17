// The list of conversations, and their way into files and back.

import { button, freshId, h, replace } from "./dom.js";
import { DEFAULTS } from "./request.js";
import { forget } from "./store.js";
import { imported, newConversation, titleOf } from "./tree.js";

/** The list, and the function that draws it again. */
export function makeSidebar(chat) {
  const list = h("ul", { class: "conversations" });
  const kinds = { type: "file", accept: "application/json,.json" };
  const file = h("input", { ...kinds, class: "unseen", id: freshId("import"), change: load });
  const choose = h("span", { class: "attach" }, file, h("label", { for: file.id }, "Import"));
  const element = h(
    "nav",
    { class: "sidebar", id: "sidebar", "aria-label": "Conversations" },
    button("New conversation", () => chat.begin(), { class: "main wide" }),
    list,
    h("div", { class: "row" }, button("Export", save), choose),
  );

  function draw() {
    const { conversations } = chat.session;
    const isNew = !conversations.includes(chat.conversation);
    replace(list, [...(isNew ? [chat.conversation] : []), ...conversations].map((conversation) => {
      const title = titleOf(conversation);
      const current = conversation === chat.conversation;
      return h(
        "li",
        { class: current ? "current" : null },
        button(title, () => chat.choose(conversation), { class: "plain", "aria-current": current ? "true" : null }),
        button("×", () => remove(conversation), { class: "plain remove", "aria-label": `Delete ${title}` }),
      );
    }));
  }

  async function remove(conversation) {
    const { session, app } = chat;
    if (!(await app.confirm("Delete this conversation?", titleOf(conversation), "Delete"))) return;
    await forget(conversation.id);
    session.conversations = session.conversations.filter((other) => other !== conversation);
    const isShown = conversation === chat.conversation;
    if (isShown) chat.choose(session.conversations[0] ?? newConversation({ ...conversation.settings }));
    else draw();
    app.announce("Deleted");
  }

  function save() {
    const text = JSON.stringify(chat.conversation, null, 1);
    const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    const name = titleOf(chat.conversation).replace(/[^\w-]+/g, "-").slice(0, 40) || "conversation";
    h("a", { href: url, download: `${name}.json` }).click();
    URL.revokeObjectURL(url);
  }

  async function load() {
    try {
      const conversation = imported(JSON.parse(await file.files[0].text()), DEFAULTS);
      await chat.session.keep(conversation);
      chat.choose(conversation);
    } catch (error) {
      chat.app.showError(error);
    }
    file.value = "";
  }

  return { element, draw };
}
