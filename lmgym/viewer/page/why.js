// Why did a token move: the terms of its loss and how each pushes it, as recorded, and the algorithm's own formulas.

import {h, number} from "./dom.js";

// In a sentence. `answer` is the tree of the answer, `row` a row's number, `action` the token's place among its actions.
export function inShort(answer, row, action) {
  const explained = answer.explanation;
  if (answer.kind !== "train") return "It was sampled in an evaluation, which trains nothing.";
  if (!explained) return "Only traces/ has the terms of a loss, and this answer is from rollouts.jsonl.";
  return sentence(answer, answer.rows[row].columns, explained.rows[row]?.push?.[action] ?? null, action);
}

// In full: each term, what the algorithm computes, and the scores that its advantage is from.
export function inFull(answer, row, action) {
  const explained = answer.explanation;
  if (!explained) return [];
  const columns = answer.rows[row].columns;
  const formulas = new Map(Object.entries(explained.formulas));
  const nodes = termsOf(explained, columns).map((term) => termElement(term, columns, formulas.get(term), action));
  const others = [...formulas].filter(([name]) => !explained.terms.includes(name) && name !== "A");
  if (others.length) nodes.push(h("div", {class: "term"}, others.map(([name, text]) => [h("h3", {}, name), h("pre", {}, text)])));
  if ("advantages" in columns) nodes.push(advantageElement(explained.scores, formulas.get("A"), columns.advantages[action]));
  return nodes;
}

function termsOf(explained, columns) {
  return explained.terms.filter((term) => `loss/${term}` in columns || `push/${term}` in columns);
}

function sentence(answer, columns, push, action) {
  if (answer.selected === false) return `It did not train: ${answer.reason || "the answer was not selected"}.`;
  if (!termsOf(answer.explanation, columns).length) {
    if ("advantages" in columns && columns.advantages.every((value) => value === 0)) return "It moved nothing: all advantages of this answer are 0, so the update left it out.";
    return "No terms of its loss were recorded.";
  }
  if (answer.explanation.note) return answer.explanation.note;
  if (push === null) return "No term of its loss depends on its log-probability.";
  if (push === 0 && columns["ratio/clipped"]?.[action]) return "It moved nothing: the clip removed its gradient.";
  if (push === 0) return "It moved nothing: its terms have no gradient.";
  const way = push > 0 ? "likelier" : "less likely";
  const because = columns.advantages?.[action] === undefined ? "" : `: its advantage is ${number(columns.advantages[action])}`;
  return `By itself, it was made ${way}${because}. Its push, minus the derivative of the loss by its log-probability, is ${number(push)}.`;
}

function termElement(term, columns, formula, action) {
  const [value, weight, push] = ["loss", "weight", "push"].map((kind) => columns[`${kind}/${term}`]?.[action] ?? null);
  const product = weight === null || value === null ? null : weight * value;
  return h("div", {class: "term"},
    h("h3", {}, `${term} term`),
    formula ? h("pre", {}, formula) : null,
    value === null ? null : h("p", {}, h("b", {}, number(value)), weight === null ? "" : [" × weight ", number(weight), " = ", h("b", {}, number(product)), " of the loss"]),
    push === null ? null : h("p", {}, "pushes the token by ", h("b", {}, number(push))));
}

function advantageElement(scores, formula, advantage) {
  const known = Object.entries(scores).filter(([, value]) => value !== null);
  return h("div", {class: "term"},
    h("h3", {}, "advantage A"),
    formula ? h("pre", {}, formula) : null,
    h("p", {}, "= ", h("b", {}, number(advantage)), " as recorded"),
    h("dl", {class: "symbols"}, known.map(([name, value]) => [h("dt", {}, number(value)), h("dd", {}, name)])));
}
