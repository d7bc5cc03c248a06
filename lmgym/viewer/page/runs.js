// The runs as a list: state, progress, the newest numbers, and the reward as a small curve.

import {count, h, link, short, svg} from "./dom.js";
import {get} from "./source.js";

const SPARK_WIDTH = 120;
const SPARK_HEIGHT = 26;

export async function runsView({runs, go}) {
  let lines = await get("list");
  const body = h("tbody");
  const heads = ["run", "state", "reward", "", "held out", "steps", "model", "date"];
  let selected = 0;

  function refresh() {
    body.replaceChildren(...runs.map((run, place) => runLine(run, lines[place])));
    mark();
  }

  function mark() {
    [...body.children].forEach((row, place) => row.classList.toggle("selected", place === selected));
  }

  function move(by) {
    selected = Math.max(0, Math.min(runs.length - 1, selected + by));
    mark();
    body.children[selected]?.scrollIntoView({block: "nearest"});
  }

  refresh();
  return {
    title: "runs", parent: "#/runs",
    node: h("section", {}, h("h1", {}, count(runs.length, "run")), h("p", {}, link("#/", "their curves together"), runs.length > 1 ? [" · ", link("#/pair/0/1", "what changed between two")] : null),
      h("div", {class: "scrolling", tabindex: 0, role: "region", "aria-label": "the runs"}, h("table", {class: "runs-table"}, h("thead", {}, h("tr", {}, heads.map((name) => h(name ? "th" : "td", {}, name)))), body))),
    keys: {j: () => move(1), k: () => move(-1), l: () => go(`#/run/${selected}/about`), Enter: () => go(`#/run/${selected}/about`)},
    help: [["j k", "next, previous run"], ["l", "open it"]],
    update: async () => { lines = await get("list"); refresh(); },
  };
}

function runLine(run, own) {
  const name = h("th", {scope: "row"}, link(`#/run/${run.number}/about`, run.name));
  if (own.problem) return h("tr", {}, name, h("td", {colspan: 7, class: "warning"}, own.problem));
  const held = own.held_out;
  return h("tr", {}, name, h("td", {}, stateMark(own)),
    h("td", {}, own.curve.length ? `${short(own.curve.at(-1))}${own.metric === "reward" ? "" : ` (${own.metric})`}` : "–"), h("td", {}, spark(own.curve, own.metric)),
    h("td", {}, held ? [h("b", {}, short(held.value)), held.low === null ? "" : ` [${short(held.low)}, ${short(held.high)}]`, h("span", {class: "quiet"}, ` ${held.name}, ${held.split}`)] : "–"),
    h("td", {}, stepsOf(own)), h("td", {}, run.model), h("td", {}, own.began === null ? "–" : new Date(own.began * 1000).toLocaleString("sv").slice(0, 16)));
}

// A state in words, with a mark of its own beside its colour.
export function stateMark(own) {
  const mark = {running: "●", finished: "✓"}[own.state] ?? "■";
  return h("span", {class: `state ${own.state}`}, h("span", {"aria-hidden": "true"}, `${mark} `), 
    own.stopped ? [`stopped early after ${own.steps.toLocaleString("en")} of ${own.planned.toLocaleString("en")} steps`, h("span", {class: "quiet"}, `: ${own.stopped}`)] : own.state,
    own.left === null ? "" : `, ${duration(own.left)} left`);
}

function stepsOf(own) {
  const words = own.planned === null ? own.steps.toLocaleString("en") : `${own.steps.toLocaleString("en")} of ${own.planned.toLocaleString("en")}`;
  return own.planned && own.state === "running" ? [h("progress", {max: own.planned, value: Math.min(own.steps, own.planned), "aria-label": "steps"}), " ", words] : words;
}

// Seconds in words: 40 s, 12 min, 3.5 h.
export function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${short(seconds / 3600)} h`;
}

function spark(values, metric) {
  if (values.length < 2) return "";
  const low = Math.min(...values);
  const reach = Math.max(...values) - low || 1;
  const at = (value, place) => `${(place / (values.length - 1) * SPARK_WIDTH).toFixed(1)},${(SPARK_HEIGHT - 3 - (value - low) / reach * (SPARK_HEIGHT - 6)).toFixed(1)}`;
  return svg("svg", {class: "spark", width: SPARK_WIDTH, height: SPARK_HEIGHT, viewBox: `0 0 ${SPARK_WIDTH} ${SPARK_HEIGHT}`, role: "img", "aria-label": `${metric} from ${short(values[0])} to ${short(values.at(-1))}`}, svg("path", {d: "M" + values.map(at).join("L")}));
}
