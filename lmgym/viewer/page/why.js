// Why did a token move: the terms of its loss, each with its formula, the numbers in it, and what was recorded.

import {h, number} from "./dom.js";

const SIGNS = {__proto__: null, log_pi: "log π", log_ref: "log π_ref", beta: "β", tau: "τ"};

// In a sentence. `answer` is the tree of the answer, `row` a row's number, `action` the token's place among its actions.
export function inShort(answer, row, action) {
  const explained = answer.explanation;
  if (answer.kind !== "train") return "It was sampled in an evaluation, which trains nothing.";
  if (!explained) return "Only traces/ has the terms of a loss, and this answer is from rollouts.jsonl.";
  const columns = answer.rows[row].columns;
  const terms = explained.terms.filter((term) => `loss/${term.name}` in columns);
  return sentence(answer, columns, explained.rows[row] ?? {}, action, terms);
}

// In full: each term, and where the advantage is from.
export function inFull(answer, row, action) {
  const explained = answer.explanation;
  if (!explained) return [];
  const columns = answer.rows[row].columns;
  const derived = explained.rows[row] ?? {};
  const valueOf = (symbol) => ("value" in symbol ? symbol.value : (derived[symbol.column] ?? columns[symbol.column])?.[action] ?? null);
  const terms = explained.terms.filter((term) => `loss/${term.name}` in columns);
  const nodes = [];
  for (const term of terms) nodes.push(termElement(term, columns, valueOf, action));
  if ("advantages" in columns) nodes.push(creditElement(answer, columns.advantages[action]));
  return nodes;
}

function sentence(answer, columns, derived, action, terms) {
  if (answer.selected === false) return `It did not train: ${answer.reason || "the answer was not selected"}.`;
  if (!terms.length) {
    if ("advantages" in columns && columns.advantages.every((value) => value === 0)) return "It moved nothing: all advantages of this answer are 0, so the update left it out.";
    return "No terms of its loss were recorded.";
  }
  const push = derived.push?.[action];
  if (push === undefined || push === null) return "These are the terms of its loss; this algorithm has no formula here for their direction.";
  if (push === 0 && columns["ratio/clipped"]?.[action]) return "It moved nothing: the clip removed its gradient.";
  if (push === 0) return "It moved nothing: its terms have no gradient.";
  const way = push > 0 ? "likelier" : "less likely";
  const because = columns.advantages?.[action] === undefined ? "" : `: its advantage is ${number(columns.advantages[action])}`;
  return `By itself, it was made ${way}${because}. Its push, minus the derivative of the loss by its log-probability, is ${number(push)}.`;
}

function termElement(term, columns, valueOf, action) {
  const value = columns[`loss/${term.name}`][action];
  const weight = columns[`weight/${term.name}`]?.[action] ?? null;
  const product = weight === null || value === null ? null : weight * value;
  const used = term.symbols.filter((symbol) => new RegExp(`\\b${symbol.name}\\b`).test(term.formula));
  return h("div", {class: "term"},
    h("h3", {}, `${term.name} term`),
    term.formula
      ? [h("code", {}, readable(term.formula)), h("code", {class: "quiet"}, "= " + substituted(term.formula, used, valueOf))]
      : h("p", {class: "quiet"}, "No formula of this algorithm is known here; what was recorded:"),
    h("p", {}, "= ", h("b", {}, number(value)), weight === null ? "" : [" × weight ", number(weight), " = ", h("b", {}, number(product)), " of the loss"]),
    h("dl", {class: "symbols"}, used.map((symbol) => [h("dt", {}, SIGNS[symbol.name] ?? symbol.name), h("dd", {}, h("b", {}, number(valueOf(symbol))), ` ${symbol.meaning}`)])));
}

function creditElement(answer, advantage) {
  const {formula, symbols, note} = answer.explanation.credit;
  const value = (name) => symbols.find((symbol) => symbol.name === name)?.value;
  const numbers = symbols.length ? h("code", {class: "quiet"}, "= " + formula.replaceAll(/[A-Za-z_]+/g, (name) => (value(name) === undefined ? name : number(value(name))))) : null;
  return h("div", {class: "term"},
    h("h3", {}, "advantage A"),
    formula ? h("code", {}, `A = ${formula}`) : null, numbers,
    h("p", {}, "= ", h("b", {}, number(advantage)), " as recorded", note ? ` ${note}` : ""),
    h("dl", {class: "symbols"}, symbols.map((symbol) => [h("dt", {}, symbol.name), h("dd", {}, h("b", {}, number(symbol.value)), ` ${symbol.meaning}`)])));
}

// A formula as people write it.
export function readable(formula) {
  return formula.replaceAll("**", "^").replaceAll(" * ", " · ").replaceAll(/\b[a-z]+(_[a-z]+)*\b/g, (name) => SIGNS[name] ?? name);
}

function substituted(formula, symbols, valueOf) {
  const known = new Map(symbols.map((symbol) => [symbol.name, valueOf(symbol)]));
  const written = formula.replaceAll("**", "^").replaceAll(" * ", " · ");
  return written.replaceAll(/\b[A-Za-z][A-Za-z_]*\b/g, (name) => {
    const value = known.get(name);
    if (value === undefined || value === null) return SIGNS[name] ?? name;
    return value < 0 ? `(${number(value)})` : number(value);
  });
}
