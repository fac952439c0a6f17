// Calls of the server. The API key is in this module's memory only, and is gone when the page is closed.

/** A failure as the server describes it. */
export class ServerError extends Error {
  constructor(message, status, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

export class Api {
  #key = null;
  #asked = null;
  #askKey;

  /** @param {(refused: boolean) => Promise<string|null>} askKey asks a person for the key; null if they have none */
  constructor(askKey) {
    this.#askKey = askKey;
  }

  get hasKey() {
    return this.#key !== null;
  }

  /** The answer as JSON. `path` is relative to the page, without a slash in front. Raises ServerError. */
  async fetchJson(path, options = {}) {
    return (await this.#request(path, options)).json();
  }

  /** The answer as text. */
  async fetchText(path, options = {}) {
    return (await this.#request(path, options)).text();
  }

  /**
   * The events of a stream, with the name and the text of each. `[DONE]` ends it and is not given.
   * Raises ServerError, also for an error that comes as an event. `warned` is called with the server's warnings.
   */
  async *stream(path, { warned, ...options } = {}) {
    const response = await this.#request(path, options);
    const warnings = response.headers.get("x-jsg-warnings");
    if (warnings) warned?.(warnings);
    for await (const event of readEvents(response.body)) {
      if (event.data === "[DONE]") continue; // the end follows, and is read, so that the connection can be used again
      if (event.data.startsWith('{"error":')) throw errorOf(JSON.parse(event.data), response.status);
      yield event;
    }
  }

  async #request(path, { method, body, signal } = {}) {
    for (;;) {
      const used = this.#key;
      const response = await this.#send(path, { method, body, signal }, used);
      if (response.ok) return response;
      if (response.status !== 401) throw await failureOf(response);
      if (this.#key === used) await this.#ask(used !== null);
    }
  }

  async #send(path, { method, body, signal }, key) {
    const headers = {};
    if (key !== null) headers.Authorization = `Bearer ${key}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    try {
      return await fetch(new URL(path, document.baseURI), {
        method: method ?? (body === undefined ? "GET" : "POST"),
        body: body === undefined ? undefined : JSON.stringify(body),
        headers,
        signal,
        cache: "no-store",
        credentials: "omit",
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The server cannot be reached. It may have ended, or the network is away.", 0);
    }
  }

  /** Asks once, however many calls were refused at the same time. */
  async #ask(refused) {
    this.#asked ??= this.#askKey(refused).finally(() => {
      this.#asked = null;
    });
    const key = await this.#asked;
    if (key === null) throw new ServerError("This server needs an API key, and none was given.", 401);
    this.#key = key;
  }
}

async function failureOf(response) {
  const text = await response.text();
  try {
    return errorOf(JSON.parse(text), response.status);
  } catch {
    const said = text.slice(0, 1000) || `The server answered with the status ${response.status}.`;
    return new ServerError(said, response.status);
  }
}

function errorOf(body, status) {
  return new ServerError(String(body.error.message), status, body.error.param ?? null);
}

/** Server-sent events from a stream of bytes. Comments, which keep a connection alive, are passed over. */
async function* readEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const event = eventOf(block);
        if (event !== null) yield event;
      }
    }
  } finally {
    await reader.cancel().catch(() => {}); // the server sees that nobody reads on, and ends the request
  }
}

function eventOf(block) {
  let name = "message";
  const data = [];
  for (const line of block.split(/\r?\n/)) {
    if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
    else if (line.startsWith("event:")) name = line.slice(6).trim();
  }
  return data.length ? { event: name, data: data.join("\n") } : null;
}
