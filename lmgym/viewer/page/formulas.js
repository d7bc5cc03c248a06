// Formulas in texts: where they stand, which dollars are money, and the text with them drawn.

import {h, shown} from "./dom.js";
import {DEEPEST, LONGEST, formula} from "./latex.js";

const MOST_FORMULAS = 2000; // formulas of a text

// Code, escapes, and all that may begin a formula.
const BEGINNING = /```[^]*?```|`[^`\n]*`|\\\\|\\\$|\$\$?|\\\(|\\\[|\\boxed(?=\{)|\\begin\{(?:align|equation|gather|eqnarray)\*?\}/g;
const PROSE = /(?<![\\A-Za-z])[A-Za-z]{3,}\s+[A-Za-z]{3,}/; // two plain words in succession
const UNFINISHED = /[^\^_\\][-=+*/<>(]$/; // a calculation before a price: $3*4=$12

// A text as nodes: its formulas drawn, everything else as `shown` shows it.
export function withFormulas(text) {
  const nodes = [];
  let end = 0;
  let count = 0;
  for (const {from, to, source, display} of formulasIn(text)) {
    const drawn = count < MOST_FORMULAS ? formula(source, display) : null;
    if (!drawn) continue;
    nodes.push(shown(text.slice(end, from)), h("span", {class: "formula", title: text.slice(from, to)}, drawn));
    count += 1;
    end = display && text[to] === "\n" ? to + 1 : to; // a block ends its line by itself
  }
  return [...nodes, shown(text.slice(end))].flat();
}

// A text block of its own, to be read.
export function readingBlock(text, properties = {}) {
  return h("div", {dir: "auto", ...properties, class: "text " + (properties.class ?? "")}, withFormulas(text));
}

// The button that changes between texts as they are and texts to be read.
export function formulasButton(onclick) {
  return h("button", {class: "chip", "aria-pressed": "false", title: "texts with their formulas drawn, or exactly as they are (m)", onclick}, "formulas");
}

// Where formulas stand in a text: {from, to, source, display}. The next mark that could close a formula decides, so that no text is searched
// again and again.
export function formulasIn(text) {
  const found = [];
  const beginnings = new RegExp(BEGINNING);
  for (let match = beginnings.exec(text); match; match = beginnings.exec(text)) {
    const own = formulaAt(text, match.index, match[0]);
    if (!own) continue;
    found.push({from: match.index, ...own});
    beginnings.lastIndex = own.to;
  }
  return found;
}

// The formula that begins there with this mark, or null.
function formulaAt(text, from, mark) {
  const start = from + mark.length;
  if (mark === "\\boxed") {
    const to = closingBrace(text, start);
    return to < 0 ? null : {to, source: text.slice(from, to), display: false};
  }
  if (mark.startsWith("\\begin")) {
    const close = mark.replace("begin", "end");
    const end = text.indexOf(close, start);
    return end < 0 ? null : {to: end + close.length, source: text.slice(from, end + close.length), display: true};
  }
  const close = {"$": "$", "$$": "$$", "\\(": "\\)", "\\[": "\\]"}[mark];
  if (!close) return null; // code, or an escape
  const display = mark === "$$" || mark === "\\[";
  const end = closing(text, start, close, display);
  if (end < 0) return null;
  const source = text.slice(start, end);
  // Pandoc's rule, so that "$5 and $6" is money: no space behind the first dollar, none before the second, no digit behind it.
  if (mark === "$" && (/^\s|\s$/.test(source) || /\d/.test(text[end + 1] ?? ""))) return null;
  if (mark === "$" && UNFINISHED.test(source)) return null;
  if (close.startsWith("$") && PROSE.test(source.replaceAll(/\\\w+\{[^{}]*\}/g, ""))) return null; // these two dollars are no pair
  return {to: end + close.length, source, display};
}

// Where a formula closes, or -1: another one begins in it, or the text or (in a line) the paragraph ends before.
function closing(text, start, close, display) {
  for (let place = start; place < text.length; place += 1) {
    if (text.startsWith(close, place)) return place;
    if (text.startsWith("\\text{", place)) { // it may hold dollars
      place = text.indexOf("}", place);
      if (place < 0) return -1;
    } else if (text[place] === "\\") {
      place += 1;
      if ("([".includes(text[place] ?? " ")) return -1;
    } else if (!display && text.startsWith("\n\n", place)) return -1;
  }
  return -1;
}

function closingBrace(text, start) {
  let depth = 0;
  for (let place = start; place < text.length && place - start < LONGEST && depth <= DEEPEST; place += 1) {
    if (text[place] === "\\") place += 1;
    else if (text[place] === "{") depth += 1;
    else if (text[place] === "}" && (depth -= 1) === 0) return place + 1;
  }
  return -1;
}
