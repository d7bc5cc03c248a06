// Questions that the commands `why`, `bisect` and `what-if` answer: asked here, computed in a process of their own.

import {background} from "./background.js";
import {chart} from "./chart.js";
import {counted, h, link, number, oneLine, say, short} from "./dom.js";
import {get, isFile, leftOut} from "./source.js";

const MOST_SHOWN = 10; // groups at either end, and answers
const KINDS = {
  "why": {title: "what moved an answer", help: "Scores an answer at each checkpoint, then takes one step again and says which groups of it made the answer likelier, and which less likely."},
  "bisect": {title: "when a number changed", help: "Finds the step at which a metric changed, and what changed with it."},
  "what-if": {title: "a step under another recipe", help: "Takes a step again as it was and with a changed recipe, and says what would have been different. With “steps to try” it really takes so many steps both ways."},
};
const FIELDS = {
  "why": [["example", "example", "of the run's data"], ["answer", "answer", "default: its reference"], ["token", "token", "default: all of them"], ["step", "step", "default: where it changed most"]],
  "bisect": [["metric", "metric", "reward"]],
  "what-if": [["changes", "changes", "optimizer.learning_rate=1e-5 algorithm.surrogate.high=0.3"], ["step", "step", "default: behind the last checkpoint"], ["try", "steps to try", "none"]],
};

export async function questionsView({run, parts, query, go, setQuery}) {
  const kind = Object.hasOwn(KINDS, parts[0] ?? "") ? parts[0] : "why";
  const here = `#/run/${run.number}`;
  const kinds = h("nav", {class: "bar", "aria-label": "questions"}, Object.entries(KINDS).map(([name, own]) => h("a", {href: `${here}/ask/${name}`, "aria-current": name === kind ? "page" : null}, own.title)));
  const heading = [h("h1", {}, "questions"), kinds, h("p", {class: "quiet"}, KINDS[kind].help)];
  const title = KINDS[kind].title;
  if (isFile) return {title, parent: "#/", node: h("section", {}, heading, h("p", {}, `A file cannot compute; \`lmgym view\` can. ${leftOut}`))};

  const stages = (await get(`runs/${run.number}/curves`)).stages;
  const stage = h("select", {"aria-label": "stage", hidden: stages.length < 2}, stages.map((own) => h("option", {value: own.stage}, own.name)));
  stage.value = query.get("stage") ?? String(stages.at(-1)?.stage ?? 0);
  const fields = FIELDS[kind].map(([name, label, placeholder]) => {
    const value = query.get(name) ?? "";
    return [name, name === "answer" ? h("textarea", {rows: Math.min(8, value.split("\n").length), placeholder, "aria-label": label}, value) : h("input", {placeholder, "aria-label": label, value}), label];
  });
  const ask = h("button", {type: "submit"}, "Ask");
  const stop = h("button", {type: "button", hidden: true, onclick: cancel}, "Cancel");
  const said = h("p", {class: "quiet", role: "status"});
  const result = h("div", {class: "answered"});
  const work = background({address: "questions", look, failed: (error) => { stop.hidden = true; tell(error.message, true); }});

  async function begin(event) {
    event.preventDefault();
    result.replaceChildren();
    const asked = Object.fromEntries(fields.map(([name, field]) => [name, name === "answer" ? field.value : field.value.trim()]));
    setQuery({...asked, stage: stage.value});
    await work.begin({run: run.number, kind, stage: Number(stage.value), ...asked});
  }

  function look(tree) {
    stop.hidden = tree.done;
    if (!tree.done) return tell(`${tree.doing || "computing"} (${Math.round(tree.seconds)} s in all)`);
    if (tree.problem) return tell(tree.problem, true);
    tell(`answered in ${Math.round(tree.seconds)} s`);
    const nodes = tree.answer === null ? [h("p", {}, "The metric has no change that is clearer than its noise.")] : SHOW[kind](tree.answer, run, go, stages);
    result.replaceChildren(...nodes.flat().filter(Boolean));
  }

  function tell(text, wrong = false) {
    say(said, text);
    said.classList.toggle("warning", wrong);
  }

  async function cancel() {
    if (!(await work.cancel())) return;
    stop.hidden = true;
    tell("cancelled");
  }

  return {
    title, parent: "#/", leave: cancel,
    node: h("section", {}, heading, h("form", {onsubmit: begin}, h("div", {class: "bar"}, stage, fields.map(([, field, label]) => h("label", {class: "field grow"}, label, field))), h("div", {class: "bar"}, ask, stop,
      h("span", {class: "quiet"}, kind === "bisect" ? "It reads the run's numbers only." : "It loads the model, and runs the run's recipe with the code that it names. The folder is only read."))), said, result),
    keys: {"/": () => fields[0][1].focus()}, help: [["/", "the first field"]],
  };
}

// What an answer of each kind looks like: nodes.
const SHOW = {
  "why": (tree, run, go) => [
    figureOf(`log-probability of ${tree.token === null ? "the answer" : `its token “${tree.token}”`}, in nats`, [{x: tree.points.map((one) => one.steps), y: tree.points.map((one) => one.logprob), points: true, label: (point) => `after ${tree.points[point].steps} steps`}]),
    tree.said.map((sentence) => h("p", {}, sentence)),
    influenceTable("groups that made it likelier", tree.groups.filter((own) => own.influence > 0).slice(0, MOST_SHOWN), tree, run, go),
    influenceTable("groups that made it less likely", tree.groups.filter((own) => own.influence < 0).slice(-MOST_SHOWN).reverse(), tree, run, go),
  ],
  "bisect": (tree, run, go, stages) => [tree.said.map((sentence) => h("p", {class: sentence.startsWith("  ") ? "inset" : null}, sentence)), h("p", {}, link(`#/run/${run.number}/step/${stages.find((own) => own.name === tree.stage)?.stage ?? 0}/${tree.step}`, `open step ${counted(tree.step)}`))],
  "what-if": (tree, run, go) => ("curves" in tree ? triedBothWays(tree) : [
    tree.said.map((sentence) => h("p", {}, sentence)),
    tree.numbers ? grid(["", "as it was", "what if"], tree.numbers.map((row) => ({cells: row}))) : null,
    tree.answers ? [h("h2", {}, "the answers that change most"), grid(["answer", "text", "score", "mean advantage"], tree.answers.filter((one) => one.advantage[0] !== one.advantage[1]).slice(0, MOST_SHOWN).map((one) => ({
      cells: [String(one.index), h("span", {dir: "auto"}, oneLine(one.text)), arrow(one.score), arrow(one.advantage) + (one.flips ? " (other way)" : "")],
      open: () => go(`#/run/${run.number}/answer/train/${tree.stage}/${tree.step}/${one.index}`)})))] : null,
  ]),
};

function influenceTable(title, groups, tree, run, go) {
  if (!groups.length) return null;
  const most = Math.max(...tree.groups.map((own) => Math.abs(own.influence)), 1e-12);
  return [h("h2", {}, title), grid(["nats", "", "example", "scores", "its best answer"], groups.map((own) => {
    const best = own.scores.reduce((place, score, here) => ((score ?? -Infinity) > (own.scores[place] ?? -Infinity) ? here : place), 0);
    return {
      cells: [(own.influence > 0 ? "+" : "") + short(own.influence), h("i", {class: "track"}, h("i", {class: own.influence < 0 ? "down" : "up", style: {width: `${Math.round(100 * Math.abs(own.influence) / most)}%`}})), own.example, own.scores.map(short).join(" "), h("span", {dir: "auto"}, oneLine(own.answers[best] ?? ""))],
      open: () => go(`#/run/${run.number}/group/${tree.stage}/${tree.step}/${own.number}`)};
  }))];
}

function triedBothWays(tree) {
  const charts = Object.entries(tree.curves).map(([name, rows]) => figureOf(name, [1, 2].map((side) => ({name: side === 1 ? "as it was" : "what if", x: rows.map((row) => row[0] + 1), y: rows.map((row) => row[side]), label: (point) => `step ${rows[point][0] + 1}`, colour: side === 1 ? "c0" : "c1"}))));
  const table = (title, paired) => (Object.keys(paired).length ? [h("h2", {}, title), grid(["metric", "as it was", "what if", "difference"], Object.entries(paired).map(([name, own]) => ({cells: [name, short(own.first.mean), short(own.second.mean), `${short(own.difference.mean)} [${short(own.difference.low)}, ${short(own.difference.high)}]`]})))] : null);
  return [tree.said.map((sentence) => h("p", {}, sentence)), h("div", {class: "charts"}, charts), table("prompts of these steps: of these two runs, not of other seeds", tree.paired), table("held-out prompts behind the last step", tree.held_out)];
}

function figureOf(title, series) {
  const drawn = chart({title, onCursor: (x, run) => drawn.describe(x, run), onZoom: () => {}, onOpen: () => {}});
  const whole = series.map((own, place) => ({name: "", colour: "c0", style: {}, run: place, low: undefined, high: undefined, places: [], ...own}));
  drawn.show(whole, [], {from: series[0].x[0] ?? 0, to: series[0].x.at(-1) ?? null});
  return drawn.node;
}

function grid(heads, rows) {
  return h("table", {class: "grid"}, h("thead", {}, h("tr", {}, heads.map((name) => h("th", {}, name)))), h("tbody", {}, rows.map(({cells, open}) =>
    h("tr", {class: open ? "opens" : null, tabindex: open ? 0 : null, onclick: open, onkeydown: (event) => event.key === "Enter" && open?.()}, cells.map((cell) => h("td", {}, cell))))));
}

function arrow([one, other]) {
  return one === other ? number(one) : `${number(one)} → ${number(other)}`;
}
