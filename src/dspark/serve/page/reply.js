// One reply on the page: its text token by token, its rounds as a drawing, and what it cost.

import { byId, count, make, makeSvg, show } from "./dom.js";
import { TokenTrack } from "./track.js";

const CELL = 7;
// Text waits this long for the tokens that it comes from; they are sent together.
const PATIENCE_MS = 60;

/** Writes runs of tokens into an element, those of a round in one group. */
class Writer {
  constructor(element) {
    this.element = element;
    this.round = null;
    this.token = null;
  }

  write({ text, token }) {
    if (token && token === this.token && this.last) {
      this.last.firstChild.appendData(text);
      return;
    }
    this.token = token;
    this.last = null;
    if (!token) {
      this.round = null;
      this.element.append(text);
      return;
    }
    if (token.round !== this.round) {
      this.round = token.round;
      this.group = make("span", { className: "round" });
      this.element.append(this.group);
    }
    // The space around a word is part of the token, but a mark under it would hang at the ends of lines.
    const [, before, word, after] = /^(\s*)(.*?)(\s*)$/s.exec(text);
    this.group.append(before);
    if (!word) return;
    const mark = make("span", { className: `token ${token.isDraft ? "draft" : "own"}`, title: describe(token) }, word);
    this.group.append(mark, after);
    this.last = after ? null : mark;
  }
}

function describe({ isDraft, place, round }) {
  const checked = round.verifyLen ? `${round.accepted} of ${round.verifyLen} checked drafts accepted` : "no drafts";
  return `${isDraft ? `accepted draft ${place + 1}` : "the model's own token"} · round ${round.number}: ${checked}`;
}

/** The reply while it arrives and afterwards. */
export class Reply {
  constructor(log) {
    this.track = new TokenTrack();
    this.rounds = [];
    this.tokenIds = [];
    this.content = "";
    this.figures = null;
    this.usage = null;
    this.finish = null;
    this.waiting = [];
    this.started = performance.now();
    this.firstAt = null;
    this.body = make("div", { className: "body" });
    this.chart = make("div", { className: "rounds", hidden: true });
    this.summary = make("span", { className: "summary" });
    this.under = make("div", { className: "under" }, this.summary);
    this.element = make("article", { className: "message reply writing" }, this.body, this.chart, this.under);
    this.element.setAttribute("aria-label", "Reply");
    this.element.setAttribute("aria-busy", "true");
    log.append(this.element);
    this.answer = new Writer(this.body);
    this.calls = [];
  }

  /** Take one event of the stream. */
  take(event) {
    if (event.usage) this.usage = event.usage;
    const choice = event.choices?.[0];
    if (!choice) return;
    const delta = choice.delta ?? { content: choice.text };
    if (delta.reasoning_content) this.waiting.push(["thoughts", delta.reasoning_content]);
    if (delta.content) this.waiting.push(["answer", delta.content]);
    for (const call of delta.tool_calls ?? []) this.#takeCall(call);
    if (event.dspark?.token_ids) this.#takeRound(event.dspark);
    if (event.dspark?.rounds !== undefined) this.figures = event.dspark;
    if (choice.finish_reason) this.finish = choice.finish_reason;
    if (event.dspark || choice.finish_reason) this.flush();
    else if (!this.timer) this.timer = setTimeout(() => this.flush(), PATIENCE_MS);
  }

  /** Show what has arrived. */
  flush() {
    clearTimeout(this.timer);
    this.timer = null;
    for (const [part, text] of this.waiting) {
      const writer = part === "answer" ? this.answer : this.#thoughts();
      if (part === "answer") this.content += text;
      this.track.take(text).forEach((run) => writer.write(run));
    }
    this.waiting = [];
  }

  /** The end, however it comes: by itself, by the user, or by a failure. */
  end(reason) {
    this.flush();
    this.finish = reason ?? this.finish;
    this.element.classList.remove("writing");
    this.element.setAttribute("aria-busy", "false");
    this.#refresh();
  }

  /** Mean tokens per round so far; NaN before the first round with drafts. */
  get acceptedLen() {
    const drafted = this.rounds.filter((round) => round.verifyLen > 0);
    return drafted.reduce((sum, round) => sum + round.accepted + 1, 0) / drafted.length;
  }

  #takeRound({ token_ids: ids, token_texts: texts, origins = [], verify_len: verifyLen = 0 }) {
    if (!ids.length) return;
    this.firstAt ??= performance.now();
    const accepted = origins.filter(Boolean).length;
    const round = { number: this.rounds.length + 1, verifyLen, accepted, own: ids.length - accepted };
    this.rounds.push(round);
    this.tokenIds.push(...ids);
    if (texts) this.track.add(texts, origins, round);
    this.frame ??= requestAnimationFrame(() => this.#refresh());
  }

  /** The drawing and the figures, at most once a frame: rounds may come faster than anyone can see. */
  #refresh() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    this.#draw();
    this.#summarise();
  }

  #takeCall({ index, function: { name, arguments: written = "" } = {} }) {
    this.flush();
    if (!this.calls[index]) {
      this.calls[index] = make("pre");
      this.body.append(
        make("details", { className: "call", open: true }, make("summary", {}, `Call of ${name}`), this.calls[index]),
      );
      this.answer = new Writer(this.body);
    }
    this.calls[index].append(written);
  }

  #thoughts() {
    if (!this.thoughts) {
      const place = make("div");
      this.body.before(make("details", { className: "thoughts", open: true }, make("summary", {}, "Thoughts"), place));
      this.thoughts = new Writer(place);
      place.classList.add("body");
    }
    return this.thoughts;
  }

  /** One column a round: accepted drafts, then the model's own token, then drafts that were checked in vain. */
  #draw() {
    if (!this.rounds.some((round) => round.verifyLen > 0)) return;
    const tallest = Math.max(...this.rounds.map((round) => Math.max(round.verifyLen + 1, round.accepted + round.own)));
    const [width, height] = [this.rounds.length * CELL, tallest * CELL];
    if (!this.svg || this.tallest !== tallest) {
      this.svg = makeSvg("svg", { role: "img" });
      this.chart.replaceChildren(this.svg);
      [this.tallest, this.drawn] = [tallest, 0];
    }
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("height", height);
    this.svg.setAttribute("aria-label", `${count(this.rounds.length, "round")}, ${show(this.acceptedLen, 2)} tokens a round`);
    for (; this.drawn < this.rounds.length; this.drawn += 1) this.svg.append(column(this.rounds[this.drawn], this.drawn, height));
    this.chart.hidden = false;
    this.chart.scrollLeft = width;
  }

  #summarise() {
    const seconds = (performance.now() - this.started) / 1000;
    const tokens = this.usage?.completion_tokens ?? this.tokenIds.length;
    const parts = [count(tokens, "token")];
    if (this.rounds.length) parts.push(count(this.rounds.length, "round"));
    if (Number.isFinite(this.acceptedLen)) parts.push(`accepted length ${show(this.acceptedLen, 2)}`);
    if (seconds > 0 && tokens) parts.push(`${show(tokens / seconds, 1)} tokens/s`);
    if (this.firstAt) parts.push(`first after ${show((this.firstAt - this.started) / 1000, 2)} s`);
    const cached = this.figures?.num_cached_tokens;
    if (cached) parts.push(`${show(cached)} of ${show(this.usage?.prompt_tokens)} prompt tokens from the cache`);
    if (this.figures?.seed !== undefined) parts.push(`seed ${this.figures.seed}`);
    if (this.finish) parts.push(ENDINGS[this.finish] ?? `ended by ${this.finish}`);
    this.summary.textContent = parts.join(" · ");
  }
}

const ENDINGS = {
  stop: "ended by itself",
  length: "cut at the limit of tokens",
  tool_calls: "ended with a call",
  stopped: "stopped by you",
  failed: "broken off",
};

function column({ verifyLen, accepted, own }, place, height) {
  const kinds = [...Array(accepted).fill("draft"), ...Array(own).fill("own")];
  kinds.push(...Array(Math.max(verifyLen - accepted, 0)).fill("rejected"));
  const cells = kinds.map((kind, row) => {
    const inset = kind === "rejected" ? 0.5 : 0;
    const size = CELL - 1.5 - 2 * inset;
    const at = { x: place * CELL + inset, y: height - (row + 1) * CELL + inset, width: size, height: size, rx: 1.2 };
    return makeSvg("rect", { class: `cell-${kind}`, ...at });
  });
  return makeSvg("g", {}, makeSvg("title", {}, document.createTextNode(`${accepted} of ${verifyLen} drafts accepted`)), ...cells);
}

/** A message of the user's. */
export function showQuestion(log, text) {
  const message = make("article", { className: "message user" }, make("div", { className: "body" }, text));
  message.setAttribute("aria-label", "You");
  log.append(message);
  byId("welcome")?.remove();
  return message;
}

/** What went wrong, in the dialogue. */
export function showFailure(log, text, retry) {
  const alert = make("p", { className: "message alert" }, make("strong", {}, "Failed: "), `${text} `);
  alert.setAttribute("role", "alert");
  alert.append(make("button", { type: "button", onclick: () => retry(alert) }, "Try again"));
  log.append(alert);
}
