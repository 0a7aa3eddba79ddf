// Which token each character of a reply comes from.

// A mark between two parts of a reply is made of so many tokens at most.
const MARK_TOKENS = 6;

/**
 * Tokens arrive with their texts; the reply's text arrives by itself, later where the server held some of it back, and
 * without the marks that tell thoughts, answer and calls apart. This finds the one in the other.
 */
export class TokenTrack {
  constructor() {
    this.tokens = [];
    this.raw = "";
    this.ends = [];
    this.cursor = 0; // characters of `raw` that have been shown or passed over
    this.next = 0; // first token that reaches beyond the cursor
  }

  /** Add the tokens of a round: their texts, and whether each is an accepted draft. */
  add(texts, origins, round) {
    texts.forEach((text, place) => {
      this.raw += text;
      this.tokens.push({ isDraft: Boolean(origins[place]), round, place });
      this.ends.push(this.raw.length);
    });
  }

  /** Cut a text that is to be shown into runs of one token each; the token is null where it is not known. */
  take(text) {
    const start = this.#find(text);
    if (start < 0) return [{ text, token: null }];
    const end = start + text.length;
    const runs = [];
    let place = start;
    while (place < end) {
      while (this.ends[this.next] <= place) this.next += 1;
      const stop = Math.min(this.ends[this.next], end);
      runs.push({ text: this.raw.slice(place, stop), token: this.tokens[this.next] });
      place = stop;
    }
    this.cursor = end;
    return runs;
  }

  /** Where the text stands: here, or behind a few tokens that are marks and not shown; -1 where it is nowhere. */
  #find(text) {
    const places = [this.cursor, ...this.ends.slice(this.next, this.next + MARK_TOKENS)];
    const place = places.find((start) => start >= this.cursor && this.raw.startsWith(text, start));
    return place ?? this.raw.indexOf(text, this.cursor);
  }
}
