// Building blocks of the page. Text always enters the document as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

/** The element with an id. */
export const byId = (id) => document.getElementById(id);

/** A new element: its tag, its properties, and what stands in it (nodes and texts). */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** A new SVG element with attributes. */
export function makeSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Give an element its share of the space, from 0 to 1; the style sheet decides what that means. */
export function setShare(element, share) {
  const bounded = Math.min(Math.max(Number.isFinite(share) ? share : 0, 0), 1);
  element.style.setProperty("--share", `${(100 * bounded).toFixed(2)}%`);
  return element;
}

/** A number with so many digits after the point, or a dash where there is none. */
export const show = (value, digits = 0) =>
  Number.isFinite(value) ? value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) : "–";

/** A share as a percentage. */
export const percent = (share) => (Number.isFinite(share) ? `${Math.round(100 * share)} %` : "–");

/** "1 token", "2 tokens". */
export const count = (number, noun) => `${show(number)} ${noun}${number === 1 ? "" : "s"}`;
