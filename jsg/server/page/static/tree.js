// A conversation as a tree of turns. An edit or another answer is a sibling, so nothing that was written is lost.
// Each node remembers which of its children is on the path that is shown.

const ROOT = "root";

/** A conversation without turns. */
export function newConversation(settings) {
  return {
    id: crypto.randomUUID?.() ?? `c${Date.now()}${Math.random()}`,
    title: "",
    updated: Date.now(),
    settings,
    nodes: { [ROOT]: { id: ROOT, role: "root", parent: null, children: [], chosen: null } },
  };
}

/** Adds a turn below a parent, and shows it. `fields` has its role and its content. */
export function addTurn(conversation, parent, fields) {
  const numbers = Object.keys(conversation.nodes).map((other) => Number(other.slice(1)) || 0);
  const id = `n${1 + Math.max(...numbers)}`; // turns may have been removed, so their number is no name
  const node = { text: "", images: [], ...fields, id, parent, children: [], chosen: null };
  conversation.nodes[id] = node;
  conversation.nodes[parent].children.push(id);
  conversation.nodes[parent].chosen = id;
  conversation.updated = Date.now();
  return node;
}

/** Takes back a turn that came to nothing; the newest of its siblings is shown. */
export function removeTurn(conversation, { id, parent }) {
  const siblings = conversation.nodes[parent];
  siblings.children = siblings.children.filter((other) => other !== id);
  if (siblings.chosen === id) siblings.chosen = siblings.children.at(-1) ?? null;
  delete conversation.nodes[id];
}

/** Whether an answer has nothing yet. */
export function isEmpty(node) {
  return node.text === "" && !node.thoughts && !node.calls?.length;
}

/**
 * Marks the answers that were being streamed when the page was left. Those of which nothing had come are no turns.
 */
export function markInterrupted(conversation) {
  for (const node of Object.values(conversation.nodes)) {
    if (!node.under_way) continue;
    delete node.under_way;
    if (isEmpty(node)) removeTurn(conversation, node);
    else node.interrupted = true;
  }
}

/** The turns that are shown, first to last. */
export function shownPath(conversation) {
  const path = [];
  let node = conversation.nodes[ROOT];
  while (node.chosen !== null) {
    node = conversation.nodes[node.chosen];
    path.push(node);
  }
  return path;
}

/** The turns from the first one to this one. */
export function pathTo(conversation, id) {
  const { nodes } = conversation;
  const path = [];
  for (let node = nodes[id]; node.role !== "root"; node = nodes[node.parent]) path.unshift(node);
  return path;
}

/** The node below which the next turn of the user comes: it is another version of one that has no answer. */
export function lastAnswered(conversation) {
  const last = shownPath(conversation).at(-1);
  return (last?.role === "user" ? last.parent : last?.id) ?? ROOT;
}

/** Which one of its siblings a turn is, from 1, and how many there are. */
export function placeOf(conversation, node) {
  const { children } = conversation.nodes[node.parent];
  return { number: children.indexOf(node.id) + 1, count: children.length };
}

/** Shows the next sibling of a turn, or the one before it. Gives its id. */
export function chooseSibling(conversation, node, step) {
  const parent = conversation.nodes[node.parent];
  const index = parent.children.indexOf(node.id) + step;
  parent.chosen = parent.children[(index + parent.children.length) % parent.children.length];
  return parent.chosen;
}

/** A short name of a conversation: the beginning of its first turn. */
export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = shownPath(conversation).find((node) => node.role === "user");
  return first?.text.trim().slice(0, 60) || "New conversation";
}

/**
 * A conversation from a file, with a new id. Only what the page knows is taken over, and the tree is built again from
 * its root, so a file cannot bring a circle or a picture from elsewhere. Raises an Error.
 */
export function imported(value, settings) {
  const nodes = value?.nodes;
  if (typeof nodes !== "object" || nodes === null || !Array.isArray(nodes[ROOT]?.children)) {
    throw new Error("The file must hold a conversation that this page has exported, but it has no tree of turns.");
  }
  const made = newConversation({ ...settings, ...plainSettings(value.settings, settings) });
  made.title = String(value.title ?? "").slice(0, 200);
  copyChildren(nodes, ROOT, made, ROOT, new Set());
  return made;
}

function copyChildren(nodes, from, made, to, seen) {
  let chosen = null;
  for (const id of nodes[from].children) {
    const node = nodes[id];
    if (seen.has(id) || !["user", "assistant", "tool"].includes(node?.role)) continue;
    seen.add(id);
    const added = addTurn(made, to, plainTurn(node));
    if (Array.isArray(node.children)) copyChildren(nodes, id, made, added.id, seen);
    if (id === nodes[from].chosen) chosen = added.id;
  }
  made.nodes[to].chosen = chosen ?? made.nodes[to].chosen;
}

function plainTurn(node) {
  const pictures = Array.isArray(node.images) ? node.images : [];
  const images = pictures
    .filter(({ url }) => typeof url === "string" && url.startsWith("data:image/"))
    .map(({ url, name }) => ({ url, name: String(name ?? "picture") }));
  const calls = (Array.isArray(node.calls) ? node.calls : []).map((call) => ({
    id: String(call?.id ?? ""),
    name: String(call?.name ?? ""),
    arguments: String(call?.arguments ?? ""),
  }));
  const results = (Array.isArray(node.results) ? node.results : []).map((result) => ({
    id: String(result?.id ?? ""),
    text: String(result?.text ?? ""),
  }));
  const [text, thoughts] = [node.text, node.thoughts].map((given) => String(given ?? ""));
  return { role: node.role, text, thoughts, images, calls, results };
}

/** The settings that have the type of the page's own. */
function plainSettings(given, own) {
  const entries = Object.entries(given ?? {});
  return Object.fromEntries(entries.filter(([name, value]) => name in own && typeof value === typeof own[name]));
}
