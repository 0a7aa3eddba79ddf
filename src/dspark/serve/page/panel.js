// The engine's numbers beside the dialogue.

import { byId, make, makeSvg, percent, setShare, show } from "./dom.js";

const HISTORY = 90;

/** Shows /debug/engine; also knows the reply that is being written. */
export class Panel {
  constructor() {
    this.history = [];
    this.last = null;
  }

  /** What the server said of itself. */
  show(engine) {
    const now = performance.now();
    this.#showState(engine.state, engine.reason);
    this.#showAcceptance(engine);
    this.#showRequests(engine);
    this.#showPages(engine);
    this.#showWork(engine, now);
    this.last = { engine, now };
  }

  /** The server is away, or wants a key. */
  showAbsent(state, reason) {
    this.#showState(state, reason);
  }

  /** Accepted length of the reply that is being written; null afterwards. */
  follow(acceptedLen) {
    this.current = acceptedLen;
    this.#showLength();
  }

  #showState(state, reason) {
    const pill = byId("state");
    pill.dataset.state = state;
    pill.textContent = state === "ready" || !reason ? state : `${state}: ${reason}`;
  }

  #showAcceptance({ acceptance, speculation }) {
    this.acceptance = acceptance;
    this.#showLength();
    const status = byId("speculation");
    status.textContent = `Speculation is ${speculation}.`;
    status.dataset.ok = speculation === "running";
    const rounds = acceptance.rounds || 1;
    byId("positions").replaceChildren(...acceptance.accepted.flatMap((accepted, place) => {
      const sent = setShare(make("i", { className: "sent" }), acceptance.verified[place] / rounds);
      const bar = make("div", { className: "bar" }, sent, setShare(make("i", { className: "accepted" }), accepted / rounds));
      const value = acceptance.rounds ? percent(accepted / rounds) : "–";
      bar.setAttribute("role", "img");
      bar.setAttribute("aria-label", `draft position ${place + 1}: ${value} accepted`);
      bar.title = `position ${place + 1}: sent in ${show(acceptance.verified[place])}, accepted in ${show(accepted)} of ${show(acceptance.rounds)} rounds`;
      return [make("span", {}, String(place + 1)), bar, make("span", { className: "value" }, value)];
    }));
    const most = Math.max(...acceptance.verify_lens, 1);
    byId("verify-lens").replaceChildren(...acceptance.verify_lens.map((number, length) => {
      const bar = setShare(make("i"), number / most);
      const label = acceptance.rounds ? percent(number / rounds) : "–";
      const space = make("div", { className: "space" }, make("b", {}, label), bar);
      return make("div", { className: "column", title: `${show(number)} rounds` }, space, make("span", {}, String(length)));
    }));
  }

  #showLength() {
    if (!this.acceptance) return;
    const isCurrent = Number.isFinite(this.current);
    const { accepted_len: mean, block_size: block } = this.acceptance;
    const value = isCurrent ? this.current : mean.value;
    byId("length-now").textContent = show(value, 2);
    byId("length-scale").textContent = block ? `of ${block + 1}` : "";
    const gauge = byId("length-gauge");
    gauge.replaceChildren(setShare(make("i"), (value - 1) / block));
    gauge.setAttribute("aria-label", `accepted length ${show(value, 2)} of ${block + 1}`);
    const interval = Number.isFinite(mean.low) ? ` (95 %: ${show(mean.low, 2)}\u2013${show(mean.high, 2)})` : "";
    byId("length-note").textContent = isCurrent
      ? `tokens per round of this reply; ${show(mean.value, 2)} since the start`
      : `tokens per round since the start${interval}`;
  }

  #showRequests({ num_running: running, num_waiting: waiting }) {
    byId("running").textContent = show(running);
    byId("waiting").textContent = show(waiting);
    this.history = [...this.history, [running, waiting]].slice(-HISTORY);
    const most = Math.max(...this.history.flat(), 1);
    const line = (index) => this.history
      .map((point, place) => `${HISTORY - this.history.length + place},${(28 - (26 * point[index]) / most).toFixed(1)}`)
      .join(" ");
    const svg = makeSvg("svg", { viewBox: `0 0 ${HISTORY - 1} 30`, preserveAspectRatio: "none", "aria-hidden": "true" },
      makeSvg("polyline", { class: "line-waiting", points: line(1) }),
      makeSvg("polyline", { class: "line-running", points: line(0) }));
    byId("history").replaceChildren(svg);
    const length = this.acceptance?.accepted_len.value;
    byId("brief").textContent = `${show(running)} running · ${show(waiting)} waiting · length ${show(length, 2)}`;
  }

  #showPages({ num_pages: all, num_free_pages: free, num_cached_pages: cached }) {
    const used = all - free - cached;
    const parts = [["used", used], ["cached", cached]];
    byId("pages").replaceChildren(...parts.map(([name, number]) => setShare(make("i", { className: name }), number / all)));
    const words = `${show(used)} in use, ${show(cached)} cached, ${show(free)} free`;
    byId("pages-note").textContent = words;
    byId("pages").setAttribute("aria-label", `pages: ${words}`);
  }

  #showWork(engine, now) {
    const { prefix, num_steps: steps, num_preemptions: preemptions, last_step_rows: rows } = engine;
    const before = this.last;
    const pace = before ? (1000 * (steps - before.engine.num_steps)) / (now - before.now) : NaN;
    const tokens = before
      ? (1000 * (engine.acceptance.emitted_tokens - before.engine.acceptance.emitted_tokens)) / (now - before.now)
      : NaN;
    const facts = [
      ["tokens a second", show(tokens, 1)],
      ["steps a second", show(pace, 1)],
      ["rows in the last step", show(rows)],
      ["prompt tokens from the cache", percent(prefix.cached_tokens / prefix.prompt_tokens)],
      ["preemptions", show(preemptions)],
      ["rows checked in vain", percent(engine.acceptance.wasted_rows?.value ?? NaN)],
    ];
    byId("facts").replaceChildren(...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  }
}
