// Two runs: how their recipes differ, the paired numbers of the newest evaluation, and the prompts whose answers changed.

import {difference, differenceBlock} from "./diff.js";
import {count, counted, h, number, promptText, textBlock} from "./dom.js";
import {get} from "./source.js";

export async function pairView({runs, parts, go}) {
  const [first, second] = parts.map(Number);
  const choose = (side, value) => h("select", {"aria-label": side, onchange: (event) => go(side === "first" ? `#/pair/${event.target.value}/${second}` : `#/pair/${first}/${event.target.value}`)},
    runs.map((run) => h("option", {value: run.number, selected: run.number === value}, run.name)));
  const heading = [h("h1", {}, "two runs"), h("div", {class: "bar"}, choose("first", first), "and", choose("second", second))];
  if (first === second) return {title: "two runs", parent: "#/", node: h("section", {}, heading, h("p", {}, "Choose two different runs."))};
  const tree = first < second ? await get(`pairs/${first}/${second}`) : turned(await get(`pairs/${second}/${first}`));
  const said = (side) => side.texts.join("\n");
  const changed = tree.prompts.filter((row) => said(row.first) !== said(row.second) || row.first.score !== row.second.score);
  changed.sort((one, other) => gap(other) - gap(one));
  const items = h("div", {class: "timeline"}, changed.map((row) => h("article", {class: "moment"},
    h("header", {}, h("b", {class: "score"}, `${number(row.first.score)} → ${number(row.second.score)}`), h("span", {class: "quiet"}, String(row.example.id))),
    h("details", {class: "prompt-box"}, h("summary", {}, "prompt"), textBlock(promptText(row.example.prompt))),
    difference(said(row.first), said(row.second)) === null ? [textBlock(said(row.first)), textBlock(said(row.second))] : differenceBlock(said(row.first), said(row.second)))));
  let selected = -1;
  const move = (by) => {
    selected = Math.max(0, Math.min(changed.length - 1, selected + by));
    [...items.children].forEach((element, place) => element.classList.toggle("selected", place === selected));
    items.children[selected]?.scrollIntoView({block: "nearest"});
  };
  const place = (side) => `stage ${counted(tree.places[side][0])} after step ${tree.places[side][1]}`;
  return {
    title: "two runs", parent: "#/",
    node: h("section", {}, heading,
      h("p", {class: "quiet"}, `The answers kept of ${tree.split}, ${count(tree.prompts.length, "prompt")}: ${place(0)} of the first, ${place(1)} of the second. \`lmgym compare\` answers all prompts anew.`),
      table(["number", "first", "second", "second less first"], tree.metrics.map((row) => [row.name, number(row.first), number(row.second), `${number(row.difference)} ${row.low === null ? "" : `[${number(row.low)}, ${number(row.high)}]`}`])),
      h("h2", {}, tree.recipe.length ? `recipes: ${count(tree.recipe.length, "difference")}` : "the recipes are equal"),
      tree.recipe.length ? table(["key", "first", "second"], tree.recipe.map((row) => [row.key, row.first, row.second])) : null,
      h("h2", {}, `${count(changed.length, "answer")} changed`), items),
    keys: {j: () => move(1), k: () => move(-1)}, help: [["j k", "next, previous change"]],
  };
}

// The same two runs in the other order.
function turned(tree) {
  const swapped = (rows) => rows.map((row) => ({...row, first: row.second, second: row.first}));
  const minus = (value) => (value === null ? null : -value);
  const metrics = swapped(tree.metrics).map((row) => ({...row, difference: minus(row.difference), low: minus(row.high), high: minus(row.low)}));
  return {...tree, metrics, places: tree.places.toReversed(), recipe: swapped(tree.recipe), prompts: swapped(tree.prompts)};
}

function gap(row) {
  return Math.abs((row.second.score ?? 0) - (row.first.score ?? 0));
}

function table(heads, rows) {
  return h("div", {class: "scrolling"}, h("table", {}, h("thead", {}, h("tr", {}, heads.map((head) => h("th", {}, head)))), h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, cell)))))));
}
