// Elements, numbers and texts. All text of a run becomes text nodes: nothing of it is ever read as HTML.

// Characters that cannot be seen or that turn the text around them: shown by name, so that they change nothing.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/gu;
const JOINERS = "\u200c\u200d"; // invisible, but needed in some scripts and emoji

// An element: h("p", {class: "note"}, "text", other). on... are listeners; null and false children are left out.
export function h(name, properties = {}, ...children) {
  return filled(document.createElement(name), properties, children);
}

// The same for SVG.
export function svg(name, properties = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), properties, children);
}

// The same for MathML.
export function mathml(name, properties = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/1998/Math/MathML", name), properties, children);
}

function filled(element, properties, children) {
  // Children first: in an element with dir="auto" each one that is added makes the browser read all of them again.
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [name, own] of Object.entries(value)) element.style.setProperty(name, own);
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  return element;
}

// A link inside of the page.
export function link(address, ...children) {
  return h("a", {href: address}, ...children);
}

// Text of a model, a data set or a user, as nodes: hidden characters stand as their names.
export function shown(text) {
  const nodes = [];
  let end = 0;
  for (const match of String(text ?? "").matchAll(HIDDEN)) {
    if (JOINERS.includes(match[0])) continue;
    nodes.push(text.slice(end, match.index), hiddenCharacter(match[0]));
    end = match.index + match[0].length;
  }
  nodes.push(String(text ?? "").slice(end));
  return nodes.filter((node) => node !== "");
}

function hiddenCharacter(character) {
  const name = "U+" + character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
  return h("span", {class: "hidden-character", title: "a character that cannot be seen"}, name);
}

// A text block of its own: its direction does not leak into the page.
export function textBlock(text, properties = {}) {
  return h("div", {dir: "auto", ...properties, class: "text " + (properties.class ?? "")}, shown(text));
}

// A number with four significant digits: 0.1235, 12.35, 1.235e-6; "–" for none.
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

// A share as per cent.
export function percent(share) {
  if (share === null || Number.isNaN(share)) return "–";
  const hundred = 100 * share;
  return (hundred === 0 || hundred >= 10 ? Math.round(hundred) : Number(hundred.toPrecision(2))) + " %";
}

export function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

// "1 answer", "2 answers".
export function count(amount, noun) {
  return amount.toLocaleString("en") + " " + noun + (amount === 1 ? "" : "s");
}

export function clamp(value, low, high) {
  return Math.min(Math.max(value, low), high);
}

// A prompt as one text: a text, or the contents of chat messages.
export function promptText(prompt) {
  if (typeof prompt === "string") return prompt;
  if (!Array.isArray(prompt)) return "";
  return prompt.map((message) => `${message.role}: ${message.content}`).join("\n");
}
