// The view "Chat": conversations on the left, the turns of one in the middle, its settings on the right.

import { streamAnswer } from "./answer.js";
import { makeComposer } from "./composer.js";
import { makeSidebar } from "./sidebar.js";
import { button, h, replace } from "./dom.js";
import { DEFAULTS, bodyOf } from "./request.js";
import { makeSettings } from "./settings.js";
import { allConversations, keep, keepSettings, lastSettings } from "./store.js";
import { addTurn, isEmpty, lastAnswered, markInterrupted, newConversation, pathTo, removeTurn, shownPath } from "./tree.js";
import { makeTurn } from "./turn.js";

const KEEP_MS = 500; // an answer that grows is kept this often, so that it outlives a reload
const NEAR_END_PX = 80; // a reader who is nearer to the end than this follows an answer as it grows

const NOT_KEPT =
  "This browser has no room for conversations, or keeps none in a private window. They are gone when you close the " +
  "page; export those that you need.";

/** What outlives the choice of another tab: conversations, and answers that are still being streamed. */
class Session {
  conversations = [];
  current = null;
  running = new Map(); // node of an answer → its AbortController
  #loaded = null;
  #hasWarned = false;

  load() {
    this.#loaded ??= allConversations().then((found) => {
      // An older page kept conversations without the settings that came later.
      for (const conversation of found) {
        conversation.settings = { ...DEFAULTS, ...conversation.settings };
        markInterrupted(conversation);
      }
      this.conversations = found;
      this.current = found[0] ?? newConversation(lastSettings(DEFAULTS));
    });
    return this.#loaded;
  }

  /** Keeps a conversation, and adds it to the others when it has its first turn. Says once that nothing can be kept. */
  async keep(conversation) {
    if (!this.conversations.includes(conversation)) this.conversations.unshift(conversation);
    const isKept = await keep(conversation);
    if (!isKept && !this.#hasWarned) this.view?.app.showError(new Error(NOT_KEPT));
    this.#hasWarned ||= !isKept;
  }
}

/** What the parts of the view share. */
class Chat {
  #turns = new Map(); // a node → its element and the function that draws it again
  #changed = new Set(); // nodes to draw again in the next frame
  #panels = []; // for each of the two panels, the function that shows or hides it

  constructor(root, app, session) {
    this.app = app;
    this.session = session;
    this.list = h("ol", { class: "turns", "aria-label": "Turns" });
    const region = { class: "scroller", tabindex: "0", role: "region", "aria-label": "Conversation" };
    this.scroller = h("div", region, this.list);
    this.sidebar = makeSidebar(this);
    this.settings = makeSettings(this);
    this.composer = makeComposer(this);
    const middle = [this.#toggles(root), this.scroller, this.composer.element];
    const section = h("section", { class: "middle", "aria-label": "Chat" }, middle);
    replace(root, this.sidebar.element, section, this.settings.element);
    this.composer.takeFilesFrom(root);
    this.draw();
  }

  get conversation() {
    return this.session.current;
  }

  /** Whether an answer of the shown path is being streamed. */
  get isRunning() {
    return shownPath(this.conversation).some((node) => this.session.running.has(node));
  }

  /** Draws everything again, for another conversation or another branch. */
  draw() {
    this.#turns.clear();
    const path = shownPath(this.conversation);
    replace(this.list, path.map((node) => this.#turn(node)), path.length === 0 && emptyHint(this.app));
    this.sidebar.draw();
    this.settings.draw();
    this.composer.draw();
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  /** Draws one turn again in the next frame of the browser, however often it changes until then. */
  drawTurn(node) {
    if (this.#changed.size === 0) requestAnimationFrame(() => this.#drawChanged());
    this.#changed.add(node);
  }

  #drawChanged() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    const follows = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    for (const node of this.#changed) this.#turns.get(node)?.draw();
    this.#changed.clear();
    if (follows) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  /** Shows another conversation. */
  choose(conversation) {
    this.session.current = conversation;
    this.closePanels();
    this.draw();
    this.composer.focus();
  }

  /** Begins a conversation with the settings of this one, unless this one has not begun yet. */
  begin() {
    const isNew = !this.session.conversations.includes(this.conversation);
    this.choose(isNew ? this.conversation : newConversation({ ...this.conversation.settings }));
  }

  /** Adds a turn of the user below a node, and lets the model answer. */
  async send(fields, parent = lastAnswered(this.conversation)) {
    const node = addTurn(this.conversation, parent, { role: "user", ...fields });
    await this.answer(node.id);
  }

  /** Streams an answer below a node, beside the answers that are there. */
  async answer(parent) {
    const { conversation, session } = this;
    let body;
    try {
      body = this.bodyFor(parent);
    } catch (error) {
      this.draw();
      this.app.showError(error);
      return;
    }
    const asking = conversation.nodes[parent];
    delete asking.error;
    delete asking.stopped;
    const node = addTurn(conversation, parent, { role: "assistant", under_way: true });
    const controller = new AbortController();
    session.running.set(node, controller);
    this.draw();
    await session.keep(conversation);
    let keptAt = performance.now();
    const changed = () => {
      session.view?.drawTurn(node);
      if (performance.now() - keptAt < KEEP_MS) return;
      keptAt = performance.now();
      session.keep(conversation);
    };
    try {
      await streamAnswer(this.app, body, node, changed, controller.signal);
      this.app.announce(`The answer is complete: ${node.text}`);
    } catch (error) {
      const isStopped = controller.signal.aborted;
      this.app.announce(isStopped ? "Stopped" : error.message);
      // What came to nothing is no turn of the model, and no later request has it.
      const shown = isEmpty(node) ? asking : node;
      if (isStopped) shown.stopped = true;
      else shown.error = error.message;
      if (shown === asking) removeTurn(conversation, node);
    } finally {
      delete node.under_way;
      session.running.delete(node);
      await session.keep(conversation);
      session.view?.ended(conversation, node);
    }
  }

  /** An answer has ended, perhaps one that began before another tab was chosen. */
  ended(conversation, node) {
    if (conversation === this.conversation && !(node.id in conversation.nodes)) this.draw();
    this.drawTurn(node);
    this.composer.draw();
    this.sidebar.draw();
  }

  /** The body of the request whose answer comes below a node. */
  bodyFor(parent) {
    const { conversation } = this;
    const path = conversation.nodes[parent].role === "root" ? [] : pathTo(conversation, parent);
    return bodyOf(this.app.model?.id, conversation.settings, path);
  }

  /** Ends the answers of the shown path: the connection is closed, and the server ends the request. */
  stop() {
    for (const node of shownPath(this.conversation)) this.session.running.get(node)?.abort();
  }

  /** The settings of the conversation have changed. */
  async keepSettings() {
    keepSettings({ ...this.conversation.settings });
    if (this.session.conversations.includes(this.conversation)) await this.session.keep(this.conversation);
  }

  #turn(node) {
    const turn = makeTurn(this, node);
    this.#turns.set(node, turn);
    return turn.element;
  }

  /** Closes the panels, which lie over the turns on a narrow screen. */
  closePanels() {
    for (const close of this.#panels) close(false);
  }

  /** Buttons of the two panels for a narrow screen, on which one of them is open at a time. */
  #toggles(root) {
    const toggle = (name, part) => {
      const show = (wanted) => {
        root.classList.toggle(`show-${part}`, wanted);
        element.setAttribute("aria-expanded", String(wanted));
      };
      const click = () => {
        const wanted = !root.classList.contains(`show-${part}`);
        this.closePanels();
        show(wanted);
      };
      const element = button(name, click, { "aria-expanded": "false", "aria-controls": part });
      this.#panels.push(show);
      return element;
    };
    return h("div", { class: "row toggles" }, toggle("Conversations", "sidebar"), toggle("Settings", "settings"));
  }
}

function emptyHint(app) {
  const hint = h("span", { class: "hint" }, "Enter sends, Shift and Enter begins a line.");
  return h("li", { class: "empty" }, `Ask ${app.model?.id ?? "the model"} something. `, hint);
}

const session = new Session();

export const view = {
  id: "chat",
  title: "Chat",
  async mount(root, app) {
    await session.load();
    session.view = new Chat(root, app, session);
    if (document.activeElement === document.body) session.view.composer.focus();
    document.addEventListener("jsg-model", modelIsKnown);
  },
  unmount() {
    session.view = null;
    document.removeEventListener("jsg-model", modelIsKnown);
  },
};

/** The name of the model stands where there are no turns, and the composer asks for pictures only if the model sees. */
function modelIsKnown() {
  if (shownPath(session.current).length === 0) session.view?.draw();
  session.view?.composer.draw();
  session.view?.settings.draw();
}
