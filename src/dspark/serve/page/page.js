// The page: what the user does, and what follows from it.

import { ApiFailure, events, getJson, send, setKey } from "./api.js";
import { byId, make } from "./dom.js";
import { Panel } from "./panel.js";
import { Reply, showFailure, showQuestion } from "./reply.js";

const EXAMPLES = [
  "How are you today?",
  "How do I read a file line by line in Python?",
  "A train covers 120 km in 90 minutes. How fast is it?",
];
const POLL_MS = { busy: 400, idle: 1500 };
const SETTLED_MS = 250;
const SETTINGS = ["temperature", "max-tokens", "seed", "system", "coloured"];
const THEMES = ["auto", "light", "dark"];

const log = byId("log");
const prompt = byId("prompt");
const panel = new Panel();
// The dialogue so far; a model without a chat format continues the text of the last message instead.
let messages = [];
let canChat = true;
let running = null;

// Asking

/** Send the messages, show the reply as it comes, and remember it. */
async function ask(previous = null) {
  const reply = new Reply(log);
  const dialogue = messages;
  const controller = new AbortController();
  running = controller;
  showRunning(true);
  try {
    const [path, body] = requestBody();
    const response = await send(path, { body, signal: controller.signal });
    for await (const event of events(response)) {
      reply.take(event);
      eachFrame(() => {
        if (running === controller) panel.follow(reply.acceptedLen);
        stay();
      });
    }
    finish(reply, dialogue, null, previous);
  } catch (error) {
    if (error.name === "AbortError") finish(reply, dialogue, "stopped", null);
    else if (dialogue === messages) fail(reply, error);
  } finally {
    if (running === controller) {
      running = null;
      showRunning(false);
    }
    panel.follow(NaN);
    stay();
    // The server ends a request a moment after its last event, or after a disconnect.
    setTimeout(poll, SETTLED_MS);
  }
}

let frame = null;
function eachFrame(work) {
  frame ??= requestAnimationFrame(() => {
    frame = null;
    work();
  });
}

function requestBody() {
  const shared = {
    temperature: byId("temperature").valueAsNumber,
    max_tokens: byId("max-tokens").valueAsNumber,
    seed: byId("seed").valueAsNumber,
    stream: true,
    stream_options: { include_usage: true },
    stream_origins: true,
  };
  if (!canChat) return ["v1/completions", { prompt: messages.at(-1).content, ...shared }];
  const system = byId("system").value.trim();
  const head = system ? [{ role: "system", content: system }] : [];
  return ["v1/chat/completions", { messages: [...head, ...messages], ...shared }];
}

function finish(reply, dialogue, reason, previous) {
  reply.end(reason);
  byId("announce").textContent = `Reply: ${reply.summary.textContent}`;
  dialogue.push({ role: "assistant", content: reply.content });
  const copy = make("button", { type: "button", onclick: () => copyText(copy, reply.content) }, "Copy");
  const again = make("button", { type: "button", onclick: () => askAgain(reply) }, "Again");
  again.title = "Ask the same once more: the same seed gives the same tokens";
  for (const old of log.querySelectorAll(".again")) old.remove();
  again.className = "again";
  reply.under.append(make("span", { className: "actions" }, copy, again));
  if (previous) reply.under.append(comparison(previous, reply));
}

function fail(reply, error) {
  if (!(error instanceof ApiFailure)) console.error(error);
  if (reply.tokenIds.length || reply.content) reply.end("failed");
  else reply.element.remove();
  if (error.status === 401) askForKey();
  const text = error instanceof ApiFailure ? error.message : "The page met something that it does not understand.";
  showFailure(log, text, (alert) => {
    alert.remove();
    if (reply.element.isConnected) reply.element.remove();
    if (!running) ask();
  });
}

/** Ask the last question once more and say whether the tokens are the same. */
function askAgain(reply) {
  if (running) return;
  messages.pop();
  ask({ tokenIds: reply.tokenIds, seed: reply.figures?.seed, settings: JSON.stringify(requestBody()) });
}

/** Whether a reply repeats an earlier one; nothing where the settings or a drawn seed differ. */
function comparison(previous, reply) {
  const kept = messages.pop();
  const isComparable = previous.settings === JSON.stringify(requestBody()) && previous.seed === reply.figures?.seed;
  messages.push(kept);
  if (!isComparable) return "";
  const isSame = String(previous.tokenIds) === String(reply.tokenIds);
  const words = isSame ? "the same tokens as before" : "other tokens than before";
  return make("span", { className: isSame ? "same" : "same differs" }, words);
}

async function copyText(button, text) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed here";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

function submit() {
  const text = prompt.value;
  if (running || !text.trim()) return;
  const wrong = SETTINGS.map(byId).find((field) => !field.checkValidity());
  if (wrong) {
    showSettings(true);
    wrong.reportValidity();
    return;
  }
  // A question that failed is replaced by the next one.
  if (messages.at(-1)?.role === "user") messages.pop();
  for (const alert of log.querySelectorAll(".alert")) alert.remove();
  messages.push({ role: "user", content: text });
  showQuestion(log, text);
  prompt.value = "";
  resize();
  scrollDown();
  ask();
}

function startAgain() {
  running?.abort();
  running = null;
  showRunning(false);
  messages = [];
  log.replaceChildren(welcome);
  prompt.focus();
}

function showRunning(isRunning) {
  byId("send").hidden = isRunning;
  byId("stop").hidden = !isRunning;
}

// Scrolling: the log stays at its end unless the user has left it.

const isAtEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 60;
let follows = true;
log.addEventListener("scroll", () => {
  follows = isAtEnd();
  byId("latest").hidden = follows;
});
const scrollDown = () => { log.scrollTop = log.scrollHeight; };
const stay = () => { if (follows) scrollDown(); };
byId("latest").addEventListener("click", scrollDown);

// The engine's numbers

let timer = null;
async function poll() {
  clearTimeout(timer);
  timer = null;
  if (!document.hidden) {
    try {
      panel.show(await getJson("debug/engine"));
      byId("key-form").hidden = true;
    } catch (error) {
      if (error.status === 401) askForKey();
      else await showHealth(error);
    }
  }
  clearTimeout(timer);
  timer = setTimeout(poll, running ? POLL_MS.busy : POLL_MS.idle);
}

/** The engine's numbers are not to be had: say at least how the server is. */
async function showHealth(error) {
  try {
    const { status, reason } = await getJson("health");
    panel.showAbsent(status, reason);
  } catch {
    panel.showAbsent("unreachable", error.message);
  }
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });

/** Which model is served, and whether it chats. */
async function meet() {
  try {
    const { data } = await getJson("v1/models");
    byId("model").textContent = `${data[0].id}, context of ${data[0].max_model_len} tokens`;
    document.title = `${data[0].id} · dspark`;
    byId("max-tokens").max = data[0].max_model_len;
    await send("tokenize", { body: { messages: [{ role: "user", content: "?" }] } });
    setCanChat(true);
  } catch (error) {
    if (error.status === 401) askForKey();
    else if (error.status === 400) setCanChat(false);
  }
}

function setCanChat(does) {
  canChat = does;
  prompt.placeholder = does ? "Message" : "Text to continue: this model does not chat";
  byId("system").disabled = !does;
}

function askForKey() {
  const form = byId("key-form");
  panel.showAbsent("unknown", "an API key is needed");
  byId("state").textContent = "an API key is needed";
  if (form.hidden) {
    form.hidden = false;
    byId("key").focus();
  }
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value.trim());
  byId("key").value = "";
  byId("key-form").hidden = true;
  meet();
  poll();
});

// Settings

function showSettings(isOpen) {
  byId("settings").hidden = !isOpen;
  byId("show-settings").setAttribute("aria-expanded", String(isOpen));
}

function restore() {
  for (const id of SETTINGS) {
    const field = byId(id);
    const kept = localStorage.getItem(`dspark-${id}`);
    if (kept !== null) field[field.type === "checkbox" ? "checked" : "value"] = field.type === "checkbox" ? kept === "true" : kept;
    field.addEventListener("change", () => {
      localStorage.setItem(`dspark-${id}`, field.type === "checkbox" ? field.checked : field.value);
      colour();
    });
  }
  colour();
  setTheme(localStorage.getItem("dspark-theme") ?? "auto");
}

const colour = () => log.classList.toggle("coloured", byId("coloured").checked);

function setTheme(theme) {
  const known = THEMES.includes(theme) ? theme : "auto";
  document.documentElement.dataset.theme = known;
  byId("theme-name").textContent = known;
  localStorage.setItem("dspark-theme", known);
}

byId("theme").addEventListener("click", () => {
  setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
});
byId("show-settings").addEventListener("click", () => showSettings(byId("settings").hidden));
byId("settings").addEventListener("submit", (event) => event.preventDefault());

// Keyboard and composer

function resize() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

prompt.addEventListener("input", resize);
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.altKey && event.key.toLowerCase() === "n") {
    event.preventDefault();
    startAgain();
  }
});
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("new-chat").addEventListener("click", startAgain);

// Begin

const welcome = byId("welcome");
byId("examples").append(...EXAMPLES.map((text) => make("button", {
  type: "button",
  onclick: () => {
    prompt.value = text;
    submit();
  },
}, text)));
restore();
// On a narrow screen the dialogue comes first; on a wide one the panel has no switch.
const isWide = matchMedia("(min-width: 58.01rem)");
const openPanel = () => { byId("panel-details").open = isWide.matches; };
isWide.addEventListener("change", openPanel);
openPanel();
if (isWide.matches) prompt.focus();
meet();
poll();
