// Keeps conversations in the browser's IndexedDB, because pictures do not fit into localStorage. Where the browser has
// none, as in some private windows, they live as long as the page.

const NAME = "jsg";
const STORE = "conversations";
const SETTINGS = "jsg.settings";

let opened = null;
const memory = new Map();

/** All conversations, the newest first. */
export async function allConversations() {
  const found = (await ask("readonly", (store) => store.getAll())) ?? [...memory.values()];
  return found.sort((a, b) => b.updated - a.updated);
}

/** Keeps a conversation. Gives whether it is still there when the page is opened again. */
export async function keep(conversation) {
  const done = await ask("readwrite", (store) => store.put(conversation));
  if (done === null) memory.set(conversation.id, conversation);
  return done !== null;
}

/** Forgets a conversation. */
export async function forget(id) {
  memory.delete(id);
  await ask("readwrite", (store) => store.delete(id));
}

/** The settings that were used last, over the defaults. */
export function lastSettings(defaults) {
  try {
    return { ...defaults, ...JSON.parse(localStorage.getItem(SETTINGS) ?? "{}") };
  } catch {
    return { ...defaults };
  }
}

/** Makes these settings those of the next conversation. */
export function keepSettings(settings) {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(settings));
  } catch {
    // The browser keeps nothing, so the next conversation begins with the defaults.
  }
}

/** The result of a request to the store; null where there is no store, or no room in it. */
async function ask(mode, request) {
  const database = await open();
  if (database === null) return null;
  const transaction = database.transaction(STORE, mode);
  const asked = request(transaction.objectStore(STORE));
  return new Promise((resolve) => {
    transaction.oncomplete = () => resolve(asked.result);
    transaction.onabort = () => resolve(null);
  });
}

function open() {
  opened ??= new Promise((resolve) => {
    try {
      const request = indexedDB.open(NAME, 1);
      request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => resolve(null);
    } catch {
      resolve(null);
    }
  });
  return opened;
}
