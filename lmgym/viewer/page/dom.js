// Elements, numbers and texts. All text of a run becomes text nodes: nothing of it is ever read as HTML.

// Characters that cannot be seen or that turn the text around them: shown by name, so that they change nothing.
const HIDDEN = /[\p{Cc}\p{Cs}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}\p{Noncharacter_Code_Point}\ufff9-\ufffb]/gu;
// Of them, those that stay where they belong: joiners in some scripts and emoji, and the choice of an emoji's picture.
const BELONGS = /(?<=[^\0-\x7f\u200c\u200d])[\u200c\u200d](?=[^\0-\x7f\u200c\u200d])|(?<=[^\0-\x7f\ufe0e\ufe0f])[\ufe0e\ufe0f]|\ufe0f(?=\u20e3)/uy;

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
  return filled(document.createElementNS(MATHML, name), properties, children);
}

const HTML = document.documentElement.namespaceURI;
const MATHML = "http://www.w3.org/1998/Math/MathML";

function filled(element, properties, children) {
  // Children first: in an element with dir="auto" each one that is added makes the browser read all of them again.
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    if (child instanceof Node || element.namespaceURI === MATHML) element.append(child); // latex.js looks at its texts itself
    else element.append(...(element.namespaceURI === HTML ? shown(child) : [plain(child)])); // so no place can forget it
  }
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [name, own] of Object.entries(value)) element.style.setProperty(name, own);
    else element.setAttribute(key, value === true ? "" : key === "value" || key === "href" ? String(value) : plain(value));
  }
  return element;
}

// A link inside of the page.
export function link(address, ...children) {
  return h("a", {href: address}, ...children);
}

// Text of a model, a data set or a user, as nodes: hidden characters stand as their names. All texts in h(...) are.
export function shown(text) {
  return pieces(text).map(([piece, hidden]) => (hidden ? hiddenCharacter(piece) : piece));
}

// The same as one text, where there are no elements: titles, labels, drawings.
export function plain(text) {
  return pieces(text).map(([piece, hidden]) => (hidden ? nameOf(piece) : piece)).join("");
}

// Replace what an element holds by a text.
export function say(element, text) {
  element.replaceChildren(...shown(text));
}

function pieces(text) {
  const whole = String(text ?? "");
  const found = [];
  let end = 0;
  for (const match of whole.matchAll(HIDDEN)) {
    BELONGS.lastIndex = match.index;
    if (match[0] === "\n" || match[0] === "\t" || BELONGS.test(whole)) continue;
    found.push([whole.slice(end, match.index), false], [match[0], true]);
    end = match.index + match[0].length;
  }
  found.push([whole.slice(end), false]);
  return found.filter(([piece]) => piece !== "");
}

function nameOf(character) {
  return "U+" + character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
}

function hiddenCharacter(character) {
  return h("span", {class: "hidden-character", title: "a character that cannot be seen"}, nameOf(character));
}

// A text block of its own: its direction does not leak into the page.
export function textBlock(text, properties = {}) {
  return h("div", {dir: "auto", ...properties, class: "text " + (properties.class ?? "")}, String(text ?? ""));
}

// A number with three significant digits, for where there is little room: 0.124, 12.3, 1235.
export function short(value) {
  return typeof value === "number" && Number.isFinite(value) && Math.abs(value) < 1e6 ? number(Math.abs(value) >= 100 ? Math.round(value) : Number(value.toPrecision(3))) : number(value);
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

// A score; null: no reward has judged the answer.
export function scoreText(score) {
  return score === null ? "not judged" : short(score);
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

// A stage or a step for people, who count from 1; files and addresses count from 0.
export function counted(number) {
  return String(Number(number) + 1);
}

// The beginning of a text, as one line of a list.
export function oneLine(text) {
  return text.slice(0, 400).replaceAll(/\s+/g, " ").slice(0, 200);
}

export function clamp(value, low, high) {
  return Math.min(Math.max(value, low), high);
}

// What a prompt asks in the end: its last message of a user, for a list. Of a text, its last paragraph.
export function lastWords(prompt) {
  if (typeof prompt === "string") return prompt.trim().split(/\n\s*\n/).at(-1);
  const message = Array.isArray(prompt) ? prompt.findLast((own) => own?.role === "user") ?? prompt.at(-1) : null;
  return typeof message?.content === "string" ? message.content : promptText(prompt);
}

// Whether a text is folded at first, so that what follows it can be seen on a small screen.
export function long(text) {
  return text.length > 280 || text.split("\n").length > 7;
}

// A prompt as one text: a text, or the contents of chat messages.
export function promptText(prompt) {
  if (typeof prompt === "string") return prompt;
  if (!Array.isArray(prompt)) return "";
  return prompt.map((message) => `${message.role}: ${message.content}`).join("\n");
}
