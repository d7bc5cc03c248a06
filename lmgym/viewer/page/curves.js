// The first view: all numbers of all runs as curves; a click on one opens the step.

import {chart} from "./chart.js";
import {count, h, link, plain, say} from "./dom.js";
import {get} from "./source.js";

const FIRST = [/^reward$/, /^held out/, /^reward\//, /^length\/mean/, /^truncated/, /^zero_variance/, /^entropy/, /^kl\//, /^ratio\/clipped/, /^gradient_norm/, /^loss/];
const SHOWN = 9; // charts at first
const MORE = 60; // with each "more": a browser cannot draw thousands at once
const COLOURS = 6; // that are apart from each other for everyone; more runs are told apart by dashes and by pointing too
const DASHES = ["7 3", "2 3", "9 3 2 3", "1 5"];

export async function curvesView({runs, go, query, setQuery}) {
  let trees = await Promise.all(runs.map((run) => get(`runs/${run.number}/curves`)));
  const cards = new Map(); // by the metric's name
  let most = SHOWN;
  let cursor = null; // place in the steps of the first run that has them
  const several = runs.length > 1;
  const box = h("input", {type: "search", placeholder: "metric (/)", "aria-label": "show metrics that contain this text", oninput: draw, value: query.get("metric") ?? ""});
  const chosen = h("input", {type: "search", placeholder: "runs", hidden: !several, "aria-label": "show runs that contain this text", oninput: draw, value: query.get("runs") ?? ""});
  const log = toggle("log axis", "log");
  const average = toggle("mean of the runs", "mean", !several);
  const whole = h("button", {hidden: true, onclick: () => zoom(null, null)}, "all steps");
  const grid = h("div", {class: "charts"});
  const more = h("button", {onclick: () => { most = Math.max(most, 0) + MORE; draw(); }});
  const marks = h("div", {class: "marks"});
  let [from, to] = [query.get("from"), query.get("to")].map((text) => (text && Number.isFinite(Number(text)) ? Number(text) : null));

  function toggle(name, key, hidden) {
    const button = h("button", {hidden, "aria-pressed": String(query.get(key) === "1"), onclick: () => { button.setAttribute("aria-pressed", String(!isOn(button))); draw(); }}, name);
    return button;
  }

  function isOn(button) {
    return button.getAttribute("aria-pressed") === "true";
  }

  function zoom(begin, end) {
    [from, to] = [begin === null ? null : Math.floor(begin), end === null ? null : Math.ceil(end)];
    draw();
  }

  function move(x, run) {
    for (const card of cards.values()) card.describe(x, run);
  }

  function open(series, point) {
    const [stage, step] = series.places[point];
    if (series.held) go(`#/run/${series.run}/held-out`);
    else if (!series.mean) go(`#/run/${series.run}/step/${stage}/${step}`);
  }

  function shownRuns() {
    const words = chosen.value.trim().toLowerCase();
    return runs.filter((run) => run.name.toLowerCase().includes(words)).map((run) => run.number);
  }

  function draw() {
    setQuery({metric: box.value.trim(), runs: chosen.value.trim(), log: isOn(log) ? "1" : "", mean: isOn(average) ? "1" : "", from: from === null ? "" : String(from), to: to === null ? "" : String(to)});
    const wanted = box.value.trim().toLowerCase();
    const places = shownRuns();
    const names = metrics(places.map((place) => trees[place])).filter((name) => name.toLowerCase().includes(wanted));
    const visible = names.slice(0, most);
    const stages = trees.reduce((longest, tree) => (tree.stages.length > longest.length ? tree.stages : longest), []);
    for (const name of visible) { // a card that is there stays, with what the pointer has found on it
      if (!cards.has(name)) {
        const card = chart({title: name, onCursor: move, onZoom: zoom, onOpen: (own, point) => open(card.series[own], point)});
        cards.set(name, card);
      }
      const card = cards.get(name);
      card.series = seriesOf(name, trees, runs, places, isOn(average));
      card.show(card.series, stages, {from: from ?? 0, to, log: isOn(log)});
    }
    for (const name of [...cards.keys()].filter((own) => !visible.includes(own))) cards.delete(name);
    const nodes = visible.map((name) => cards.get(name).node);
    if (nodes.length !== grid.children.length || nodes.some((node, place) => node !== grid.children[place])) grid.replaceChildren(...nodes);
    whole.hidden = from === null && to === null;
    more.hidden = visible.length === names.length;
    say(more, `Show ${Math.min(MORE, names.length - visible.length)} more of ${count(names.length, "metric")}`);
    marks.replaceChildren(...trees.flatMap((tree, place) => remarks(tree, runs[place], several)));
  }

  // What the charts show as a file for other programs: a row for each point.
  function save() {
    const rows = [["run", "metric", "split", "stage", "step", "value", "low", "high"]];
    for (const [name, card] of cards) {
      for (const own of card.series.filter((one) => !one.mean)) {
        own.x.forEach((x, point) => {
          if (own.y[point] === null || x < (from ?? 0) || x > (to ?? Infinity)) return;
          rows.push([own.runName, name, own.split, ...own.places[point], own.y[point], own.low?.[point] ?? "", own.high?.[point] ?? ""]);
        });
      }
    }
    const text = rows.map((row) => row.map(cell).join(",")).join("\n") + "\n";
    const address = URL.createObjectURL(new Blob([text], {type: "text/csv"}));
    h("a", {href: address, download: "curves.csv"}).click();
    setTimeout(() => URL.revokeObjectURL(address), 10_000);
  }

  function step(by) {
    const places = trees.map((tree) => tree.tables.train).find(Boolean);
    if (!places) return;
    cursor = Math.max(0, Math.min(places.x.length - 1, cursor === null ? places.x.length - 1 : cursor + by));
    move(places.x[cursor] + 1, trees.findIndex((tree) => tree.tables.train));
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
    node: h("section", {}, h("h1", {class: "unseen"}, "curves"), h("div", {class: "bar"}, box, chosen, log, average, whole, h("button", {onclick: save, title: "what the charts show, as a table"}, "save as CSV"), h("span", {class: "grow"}), link(`#/run/0/ask/bisect?metric=${encodeURIComponent(box.value.trim())}`, "when did it change?"), h("span", {class: "quiet"}, "click a curve to open its step; drag to see some steps only")), marks, grid, h("p", {}, more)),
    keys: {j: () => step(1), k: () => step(-1), l: openCursor, Enter: openCursor, "/": () => box.focus(), Escape: () => zoom(null, null)},
    help: [["j k", "next, previous step"], ["l", "open the step"], ["Esc", "all steps"]],
    update: async () => {
      trees = await Promise.all(runs.map((run) => get(`runs/${run.number}/curves`)));
      draw();
    },
  };
}

// A cell of a CSV file. A text that a spreadsheet would take for a formula begins with an apostrophe.
function cell(value) {
  if (typeof value === "number") return String(value);
  const text = plain(value).replace(/^[=+\-@]/, "'$&");
  return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
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
  const ranked = [...names].map((name) => [rank(name), name]);
  return ranked.sort(([one, name], [two, other]) => one - two || (name < other ? -1 : 1)).map(([, name]) => name);
}

// The curves of one name: one for each run of `places`, and for an evaluated metric each split; and their mean if asked.
function seriesOf(name, trees, runs, places, withMean) {
  const held = name.startsWith("held out: ");
  const metric = held ? name.slice("held out: ".length) : name;
  const several = runs.length > 1; // then colours are runs, and their names stand above the charts
  const series = [];
  for (const place of places) {
    const stages = trees[place].stages;
    for (const [table, own] of Object.entries(trees[place].tables)) {
      if ((table !== "train") !== held || !Object.hasOwn(own.values, metric)) continue;
      const split = held ? table.slice("evaluation/".length) : "";
      const later = series.some((earlier) => earlier.run === place);
      const stageOf = (stage) => (stages.length > 1 ? ` of ${stages.find((one) => one.stage === stage)?.name ?? `stage ${stage + 1}`}` : "");
      series.push({
        name: several ? "" : split, runName: runs[place].name, run: place, split, held, points: held, places: own.places,
        x: held ? own.x : own.x.map((x) => x + 1), y: own.values[metric], low: own.low[metric], high: own.high[metric],
        label: (point) => (held ? `after step ${own.places[point][1]}` : `step ${own.places[point][1] + 1}`) + stageOf(own.places[point][0]),
        ...colourOf(several ? place : series.length, later),
      });
    }
  }
  if (!withMean || !several) return series;
  return [...series.map((own) => ({...own, faded: true})), ...meansOf(series)];
}

// Of each split, the mean over its curves where all of them have a number.
function meansOf(series) {
  return [...new Set(series.map((own) => own.split))].flatMap((split) => {
    const own = series.filter((one) => one.split === split);
    if (own.length < 2) return [];
    const values = own.map((one) => new Map(one.x.map((x, point) => [x, one.y[point]])));
    const points = own[0].x.map((_, point) => point).filter((point) => values.every((one) => (one.get(own[0].x[point]) ?? null) !== null));
    const at = (point) => values.reduce((sum, one) => sum + one.get(own[0].x[point]), 0) / values.length;
    return [{...own[0], name: "", runName: `mean of ${own.length}`, run: null, mean: true, low: undefined, high: undefined, x: points.map((point) => own[0].x[point]), y: points.map(at), places: points.map((point) => own[0].places[point]), label: (place) => own[0].label(points[place]), colour: "average", style: {}}];
  });
}

// The colour of a run: its class, and from the seventh run on a hue of its own and dashes.
export function colourOf(place, later) {
  const dashed = later ? " dashed" : "";
  if (place < COLOURS) return {colour: "c" + place + dashed, style: {}};
  const dashes = DASHES[Math.floor((place - COLOURS) / 12) % DASHES.length];
  return {colour: "hue" + dashed, style: {"--hue": String(Math.round((place % 12) * 30 + 15)), "--dashes": dashes}};
}

// What the reader must know of a run's records: damaged lines, and resumes that changed something.
function remarks(tree, run, named) {
  const before = named ? `${run.name}: ` : "";
  const problems = tree.problems.map((problem) => h("p", {class: "warning"}, before + problem));
  const resumed = tree.resumed.map((own) => h("p", {class: "quiet"}, `${before}resumed after step ${own.x}: ${own.changed.join("; ")}`));
  const empty = Object.keys(tree.tables).length ? [] : [h("p", {class: "quiet"}, before + "nothing was recorded yet")];
  return [...problems, ...resumed, ...empty];
}

// The runs, where there are several: their colours, and a link to compare two.
export function runsBar(runs) {
  if (runs.length < 2) return null;
  const names = runs.map((run, place) => {
    const {colour, style} = colourOf(place, false);
    return h("span", {class: "name " + colour, style}, link(`#/run/${place}/about`, run.name));
  });
  return h("div", {class: "runs"}, names, link("#/pair/0/1", "what changed between two runs"));
}
