// A sequence of tokens as text: what the loss sees and what it does not, with thoughts and tool calls folded.

import {count, h, shown} from "./dom.js";
import {withFormulas} from "./formulas.js";

const FOLDS = [["think", "thought"], ["thinking", "thought"], ["reasoning", "thought"], ["tool_call", "tool call"], ["tool_response", "tool result"], ["tool_result", "tool result"]];
const LONG = 600; // characters of a prompt that is shown at once
const LONG_FOLD = 400; // tokens of a thought or a tool call that is
const PICTURES = 2 ** 56; // ids from here on are pieces of pictures

// The parts of a row: {sampled, turn, from, to} with places in row.ids.
export function partsOf(row) {
  const turnOf = new Map(row.actions.map((place, action) => [place, row.turn[action]]));
  const parts = [];
  for (let place = 0; place < row.ids.length; place += 1) {
    const turn = turnOf.get(place) ?? null;
    const last = parts.at(-1);
    if (last && last.turn === turn) last.to = place + 1;
    else parts.push({sampled: turn !== null, turn, from: place, to: place + 1});
  }
  return parts;
}

// The row as elements; `turns` are the answer's turns. Each token is a span with data-place, and data-row. In a session
// that is a tree, `start` is the first of its turns in it: what that one goes on from stands elsewhere.
export function rowElements(row, number, turns, start = null) {
  const special = new Set(row.special);
  const tokens = (from, to) => row.pieces.slice(from, to).map((piece, at) => pictureAt(row, from + at) ?? tokenElement(piece, from + at, number, special.has(from + at)));
  const elements = partElements(row, turns, start, (part) => h("div", {class: "tokens", dir: "auto"}, folded(row, part, tokens)));
  if (row.source) {
    const source = row.source.pieces.map((piece, place) => tokenElement(piece, null, number, row.source.special.includes(place)));
    elements.unshift(sourceElement(row.source, h("div", {class: "tokens", dir: "auto"}, source)));
  }
  return elements;
}

// The same to be read: texts with their formulas drawn, without boundaries of tokens.
export function readingElements(row, turns, start = null) {
  const block = (nodes) => h("div", {class: "reading", dir: "auto"}, nodes);
  const elements = partElements(row, turns, start, (part) => block(folded(row, part, (from, to) => readingNodes(row, from, to))));
  if (row.source) elements.unshift(sourceElement(row.source, block(readingNodes(row.source, 0, row.source.pieces.length))));
  return elements;
}

// What stands at a place where a picture is: the picture before its first token, nothing for its others.
function pictureAt(row, place) {
  if (row.ids[place] < PICTURES) return null;
  const address = row.pictures?.[place];
  if (address) return h("img", {class: "picture", src: address, alt: "picture of the prompt"});
  return row.pieces[place] === "" ? [] : h("span", {class: "token special"}, "picture");
}

// Control tokens stay marked: they are no text, and no formula spans one. Nor is a picture.
function readingNodes(row, from, to) {
  const special = new Set(row.special);
  const nodes = [];
  let begin = from;
  for (let place = from; place <= to; place += 1) {
    const picture = place < to && row.ids ? pictureAt(row, place) : null;
    if (place < to && !special.has(place) && picture === null) continue;
    nodes.push(withFormulas(row.pieces.slice(begin, place).join("")));
    if (place < to) nodes.push(picture ?? tokenElement(row.pieces[place], null, null, true));
    begin = place + 1;
  }
  return nodes;
}

function sourceElement(source, body) {
  return h("details", {class: "part given"}, h("summary", {}, h("b", {}, "encoder's input"), ` ${count(source.pieces.length, "token")}`), body);
}

// The parts of a row as details; bodyOf(part) makes what stands in them.
function partElements(row, turns, start, bodyOf) {
  const first = row.turn[0] ?? 0; // of the row: another row begins where the conversation before was cut
  const parts = partsOf(row);
  if (start && parts.length) parts[0].from = start.new;
  const heading = start?.reason ? [h("h3", {class: "fork"}, `turn ${start.turn + 1} ${start.reason}`)] : [];
  return [...heading, ...parts.map((part) => {
    const size = count(part.to - part.from, "token");
    const body = bodyOf(part);
    if (!part.sampled) {
      const text = row.pieces.slice(part.from, part.to).join("");
      const behind = start && start.parent !== null && part === parts[0];
      const name = behind ? `behind turn ${start.parent + 1}` : part.from > 0 ? "observation" : row.source ? "decoder's start" : first > 0 ? `prompt of turn ${first + 1}` : "prompt";
      return h("details", {class: "part given", open: text.length <= LONG || part.from > 0}, h("summary", {}, h("b", {}, name), ` ${size}, not seen by the loss`), body);
    }
    const turn = turns[part.turn] ?? {};
    const several = turns.length > 1 ? `turn ${part.turn + 1}` : "answer";
    const facts = [size, turn.stop && `ended by ${turn.stop}`, turn.reward ? `reward ${Number(turn.reward.toPrecision(4))}` : "",
      typeof turn.seconds === "number" ? `then ${Number(turn.seconds.toPrecision(3))} s of its environment` : ""].filter(Boolean).join(", ");
    return h("details", {class: "part said", open: true, "data-turn": part.turn}, h("summary", {}, h("b", {}, several), " " + facts), body);
  })];
}

function tokenElement(piece, place, row, special) {
  const element = h("span", {class: special ? "token special" : "token"});
  if (place !== null) {
    element.dataset.place = place;
    element.dataset.row = row;
  }
  if (piece === "") {
    element.classList.add("part-of-character");
    element.append("▯");
  } else {
    element.append(...shown(piece).flatMap((node) => (typeof node === "string" ? lines(node) : [node])));
  }
  return element;
}

// Line breaks stay, and are visible.
function lines(text) {
  return text.split("\n").flatMap((line, place) => (place === 0 ? [line] : [h("i", {class: "line-break"}, "⏎"), "\n", line])).filter((node) => node !== "");
}

// The nodes of a part, with what stands between <think> and </think> and the like in details; nodesOf(from, to) makes them.
function folded(row, part, nodesOf) {
  const text = row.pieces.slice(part.from, part.to).join("");
  const starts = [];
  let length = 0;
  for (let place = part.from; place < part.to; place += 1) {
    starts.push(length);
    length += row.pieces[place].length;
  }
  const tokenAt = (character) => { // the token that a character belongs to
    let [low, high] = [0, starts.length - 1];
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (starts[middle] <= character) low = middle;
      else high = middle - 1;
    }
    return part.from + low;
  };
  const nodes = [];
  let place = part.from;
  for (const {begin, end, name} of spans(text)) {
    const [first, last] = [Math.max(place, tokenAt(begin)), tokenAt(end - 1) + 1];
    if (last <= first) continue;
    nodes.push(nodesOf(place, first), h("details", {class: "fold", open: last - first <= LONG_FOLD}, h("summary", {}, `${name}, ${count(last - first, "token")}`), nodesOf(first, last)));
    place = last;
  }
  nodes.push(nodesOf(place, part.to));
  return nodes;
}

function spans(text) {
  const found = [];
  for (const [tag, name] of FOLDS) {
    let begin = text.indexOf(`<${tag}>`);
    while (begin >= 0) {
      const close = text.indexOf(`</${tag}>`, begin);
      const end = close < 0 ? text.length : close + tag.length + 3;
      found.push({begin, end, name});
      begin = close < 0 ? -1 : text.indexOf(`<${tag}>`, end);
    }
  }
  found.sort((one, other) => one.begin - other.begin);
  return found.filter((span, place) => found.slice(0, place).every((earlier) => span.begin >= earlier.end));
}
