// The answers of a step as a table of numbers: any of its columns, thousands of rows, sorted by a click on a head.

import {h, short} from "./dom.js";
import {virtualList} from "./list.js";

const SHOWN_COLUMNS = ["group", "score", "length", "surprise", "truncated"]; // columns at first
const MOST_COLUMNS = 12; // columns at once

// numbers: the columns by name. open(row) opens an answer, sortBy(name) sorts by a column, seen(first, last) is as of a
// list, changed(text) keeps the choice of columns.
export function answersTable({numbers, indices, columns, open, sortBy, changed, seen}) {
  const names = Object.keys(numbers).filter((name) => !["index", "kept"].includes(name) && numbers[name].some((value) => value !== null));
  const asked = columns.split(",").filter((name) => names.includes(name));
  let chosen = asked.length ? asked.slice(0, MOST_COLUMNS) : SHOWN_COLUMNS.filter((name) => names.includes(name));
  let rows = [];
  let texts = new Map();
  const heads = h("div", {class: "table-row table-heads"});
  const list = virtualList({height: 30, row: element, open: (place) => open(rows[place]), seen, label: "answers of the step as a table"});
  const choice = h("details", {class: "columns-choice"}, h("summary", {}, "columns"), h("div", {class: "bar"}, names.map((name) =>
    h("label", {}, h("input", {type: "checkbox", checked: chosen.includes(name), onchange: (event) => choose(name, event.target)}), " ", name))));
  const node = h("div", {class: "answers-table", hidden: true}, choice, heads, list.node);

  function choose(name, box) {
    if (box.checked && chosen.length >= MOST_COLUMNS) box.checked = false;
    else chosen = names.filter((own) => (own === name ? box.checked : chosen.includes(own)));
    changed(chosen.join(","));
    draw();
  }

  function element(place) {
    const row = rows[place];
    return h("div", {class: "table-row"}, h("span", {class: "id"}, String(indices[row])), chosen.map((name) => h("span", {class: "n"}, short(numbers[name][row]))), h("span", {class: "prompt", dir: "auto"}, texts.get(indices[row]) ?? ""));
  }

  function draw() {
    for (const own of [heads, list.node]) own.style.setProperty("--columns", String(chosen.length));
    heads.replaceChildren(h("button", {class: "head", onclick: () => sortBy("index")}, "number"), ...chosen.map((name) => h("button", {class: "head n", title: `sort by ${name}`, onclick: () => sortBy(name)}, name)), h("span", {}, "answer"));
    list.show(rows.length);
  }

  return {node, list, show: (some, known) => { [rows, texts] = [some, known]; draw(); }};
}
