// The first view: all numbers of all runs as curves; a click on one opens the step.

import {chart} from "./chart.js";
import {count, h, link} from "./dom.js";
import {get} from "./source.js";

const FIRST = [/^reward$/, /^held out/, /^reward\//, /^length\/mean/, /^truncated/, /^zero_variance/, /^entropy/, /^kl\//, /^ratio\/clipped/, /^gradient_norm/, /^loss/];
const SHOWN = 9; // charts before "show all"

export async function curvesView({runs, go}) {
  let trees = await Promise.all(runs.map((run) => get(`runs/${run.number}/curves`)));
  let cards = [];
  let all = false;
  let cursor = null; // place in the steps of the first run that has them
  const box = h("input", {type: "search", placeholder: "metric (/)", "aria-label": "show metrics that contain this text", oninput: draw});
  const grid = h("div", {class: "charts"});
  const more = h("button", {onclick: () => { all = true; draw(); }});
  const marks = h("div", {class: "marks"});

  function move(x) {
    for (const card of cards) card.describe(x);
  }

  function open(series, point) {
    const [stage, step] = series.places[point];
    go(series.held ? `#/run/${series.run}/held-out` : `#/run/${series.run}/step/${stage}/${step}`);
  }

  function draw() {
    const wanted = box.value.trim().toLowerCase();
    const names = metrics(trees).filter((name) => name.toLowerCase().includes(wanted));
    const visible = all || wanted ? names : names.slice(0, SHOWN);
    const stages = trees.reduce((most, tree) => (tree.stages.length > most.length ? tree.stages : most), []);
    cards = visible.map((name) => {
      const series = seriesOf(name, trees, runs);
      return chart({title: name, series, stages, onCursor: move, onOpen: (own, point) => open(series[own], point)});
    });
    grid.replaceChildren(...cards.map((card) => card.node));
    more.hidden = visible.length === names.length;
    more.textContent = `Show all ${count(names.length, "metric")}`;
    marks.replaceChildren(...trees.flatMap((tree, place) => remarks(tree, runs[place], runs.length > 1)));
  }

  function step(by) {
    const places = trees.map((tree) => tree.tables.train).find(Boolean);
    if (!places) return;
    cursor = Math.max(0, Math.min(places.x.length - 1, cursor === null ? places.x.length - 1 : cursor + by));
    move(places.x[cursor]);
    marks.dataset.step = places.places[cursor].join("/");
  }

  function openCursor() {
    const owner = trees.findIndex((tree) => tree.tables.train);
    if (cursor === null || owner < 0) return;
    go(`#/run/${owner}/step/${trees[owner].tables.train.places[cursor].join("/")}`);
  }

  draw();
  return {
    title: "curves",
    node: h("section", {}, h("div", {class: "bar"}, box, h("span", {class: "grow"}), h("span", {class: "quiet"}, "click a curve to open its step")), marks, grid, h("p", {}, more)),
    keys: {j: () => step(1), k: () => step(-1), l: openCursor, Enter: openCursor, "/": () => box.focus()},
    help: [["j k", "next, previous step"], ["l", "open the step"]],
    update: async () => {
      trees = await Promise.all(runs.map((run) => get(`runs/${run.number}/curves`)));
      draw();
    },
  };
}

// The names of all curves, the most telling ones first. An evaluated metric is "held out: NAME".
function metrics(trees) {
  const names = new Set();
  for (const tree of trees) {
    for (const [table, own] of Object.entries(tree.tables)) {
      for (const name of Object.keys(own.values)) {
        if (own.values[name].some((value) => value !== null) && name !== "count") names.add(table === "train" ? name : `held out: ${name}`);
      }
    }
  }
  const rank = (name) => {
    const place = FIRST.findIndex((pattern) => pattern.test(name));
    const common = /^held out: (length|truncated)/.test(name) ? 0.5 : 0;
    return (place < 0 ? FIRST.length : place) + common;
  };
  return [...names].sort((one, other) => rank(one) - rank(other) || one.localeCompare(other));
}

// The curves of one name: one for each run, and for an evaluated metric each split.
function seriesOf(name, trees, runs) {
  const held = name.startsWith("held out: ");
  const metric = held ? name.slice("held out: ".length) : name;
  const series = [];
  trees.forEach((tree, place) => {
    for (const [table, own] of Object.entries(tree.tables)) {
      if ((table !== "train") !== held || !(metric in own.values)) continue;
      const split = held ? table.slice("evaluation/".length) : "";
      const several = runs.length > 1; // then colours are runs, and their names stand above the charts
      const later = series.some((earlier) => earlier.run === place);
      series.push({
        name: several ? "" : split, run: place, held, points: held, x: own.x, y: own.values[metric], places: own.places,
        low: own.low[metric], high: own.high[metric],
        colour: "c" + ((several ? place : series.length) % 6) + (several && later ? " dashed" : ""),
      });
    }
  });
  return series;
}

// What the reader must know of a run's records: damaged lines, and resumes that changed something.
function remarks(tree, run, named) {
  const before = named ? `${run.name}: ` : "";
  const problems = tree.problems.map((problem) => h("p", {class: "warning"}, before + problem));
  const resumed = tree.resumed.map((own) => h("p", {class: "quiet"}, `${before}resumed at step ${own.x}: ${own.changed.join("; ")}`));
  const empty = Object.keys(tree.tables).length ? [] : [h("p", {class: "quiet"}, before + "nothing was recorded yet")];
  return [...problems, ...resumed, ...empty];
}

// The runs, where there are several: their colours, and a link to compare two.
export function runsBar(runs) {
  if (runs.length < 2) return null;
  const names = runs.map((run, place) => h("span", {class: "name c" + (place % 6)}, link(`#/run/${place}/held-out`, run.name)));
  return h("div", {class: "runs"}, names, link("#/pair/0/1", "what changed between two runs"));
}
