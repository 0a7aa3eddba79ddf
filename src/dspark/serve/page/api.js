// Talking to the server: the key, errors as sentences, and streams of events.

const KEY = "dspark-api-key";

/** What went wrong, as a sentence for people; status 0 means that nobody answered. */
export class ApiFailure extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const setKey = (key) => sessionStorage.setItem(KEY, key);

/** Send a request; a body makes it a POST. Throws ApiFailure. */
export async function send(path, { body, signal } = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const options = { headers, signal, cache: "no-store" };
  if (body !== undefined) {
    options.method = "POST";
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiFailure(0, "The server does not answer. Is it still running?");
  }
  if (!response.ok) throw await failureOf(response);
  return response;
}

/** A response as JSON. */
export const getJson = async (path, options) => (await send(path, options)).json();

/** The events of a streamed answer, one object each, until the server says that it is done. Throws ApiFailure. */
export async function* events(response) {
  let held = "";
  for await (const piece of pieces(response)) {
    held += piece;
    const blocks = held.split("\n\n");
    held = blocks.pop();
    for (const block of blocks) {
      const text = block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (text === "[DONE]") return;
      if (!text) continue;
      const event = JSON.parse(text);
      if (event.error) throw new ApiFailure(event.error.code ?? 0, sentence(event.error.message));
      yield event;
    }
  }
  throw new ApiFailure(0, "The connection closed before the reply had ended.");
}

async function* pieces(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiFailure(0, "The connection broke before the reply had ended.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function failureOf(response) {
  let message = "";
  try {
    message = (await response.json()).error?.message ?? "";
  } catch {
    // Not JSON: the status has to do.
  }
  const retry = response.headers.get("Retry-After");
  const when = retry ? ` Try again in ${retry} s.` : "";
  return new ApiFailure(response.status, (message ? sentence(message) : `The server answered with status ${response.status}.`) + when);
}

function sentence(message) {
  const text = String(message ?? "The server failed without a reason.");
  // A sentence that begins with the name of a field keeps the name as it is.
  const begin = /^[a-z]+\b(?![_.[])/.test(text) ? text.charAt(0).toUpperCase() : text.charAt(0);
  return begin + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}
