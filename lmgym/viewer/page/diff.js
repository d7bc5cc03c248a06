// What changed between two texts, word by word.

import {h, shown} from "./dom.js";

const MOST = 4e6; // cells of the table of a comparison: about 2,000 words that differ on both sides

// [[kind, text]] with kind "same", "gone" or "new"; null if the texts are too long to compare.
export function difference(before, after) {
  const one = words(before);
  const other = words(after);
  // 1. What both begin and end with needs no table.
  let begin = 0;
  while (begin < Math.min(one.length, other.length) && one[begin] === other[begin]) begin += 1;
  let end = 0;
  while (end < Math.min(one.length, other.length) - begin && one.at(-1 - end) === other.at(-1 - end)) end += 1;
  const left = one.slice(begin, one.length - end);
  const right = other.slice(begin, other.length - end);
  if (left.length * right.length > MOST) return null;
  // 2. The longest common subsequence of the rest: lengths[i][j] is that of left from i on and right from j on.
  const width = right.length + 1;
  const lengths = new Uint16Array((left.length + 1) * width);
  for (let i = left.length - 1; i >= 0; i -= 1) {
    for (let j = right.length - 1; j >= 0; j -= 1) {
      const skipped = Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
      lengths[i * width + j] = left[i] === right[j] ? lengths[(i + 1) * width + j + 1] + 1 : skipped;
    }
  }
  // 3. The pieces in order, neighbours of one kind joined.
  const pieces = [];
  const add = (kind, text) => { if (pieces.at(-1)?.[0] === kind) pieces.at(-1)[1] += text; else if (text) pieces.push([kind, text]); };
  add("same", one.slice(0, begin).join(""));
  let [i, j] = [0, 0];
  while (i < left.length || j < right.length) {
    if (i < left.length && j < right.length && left[i] === right[j]) { add("same", left[i]); i += 1; j += 1; }
    else if (i < left.length && (j === right.length || lengths[(i + 1) * width + j] >= lengths[i * width + j + 1])) { add("gone", left[i]); i += 1; }
    else { add("new", right[j]); j += 1; }
  }
  add("same", end ? one.slice(-end).join("") : "");
  return pieces;
}

function words(text) {
  return text.match(/\s+|[\p{L}\p{M}]+|\p{N}+|[^\s\p{L}\p{M}\p{N}]/gu) ?? [];
}

// A text block with what changed marked.
export function differenceBlock(before, after) {
  const pieces = before === null ? null : difference(before, after);
  const block = h("div", {class: "text answer", dir: "auto"});
  if (pieces === null) {
    block.append(...shown(after));
    return block;
  }
  for (const [kind, text] of pieces) {
    block.append(kind === "same" ? h("span", {}, text) : h(kind === "gone" ? "del" : "ins", {}, text));
  }
  return block;
}
