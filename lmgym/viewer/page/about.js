// What a run is: how far, what changed on held-out data, what the doctor says, and its recipe.

import {count, counted, h, lastWords, link, oneLine, scoreText, short} from "./dom.js";
import {stateMark} from "./runs.js";
import {get} from "./source.js";

export async function aboutView({run}) {
  const address = `runs/${run.number}`;
  let tree = await get(`${address}/overview`);
  const facts = h("p", {class: "facts"});
  const newest = h("div", {class: "newest"});
  const results = h("div");
  const findings = h("div", {role: "status"}, h("p", {class: "quiet"}, "the doctor reads the records …"));

  function refresh() {
    const stages = tree.stages.map((stage) => h("span", {}, tree.stages.length > 1 ? `${stage.name}: ` : "", h("b", {}, stage.steps.toLocaleString("en")), stage.planned === null ? " steps" : ` of ${count(stage.planned, "step")}`));
    facts.replaceChildren(stateMark(tree.progress), ...stages, run.model ? h("span", {}, "model ", h("b", {}, run.model)) : "", run.algorithms.length ? h("span", {}, run.algorithms.join(", ")) : "");
    results.replaceChildren(...Object.entries(tree.evaluations).map(([split, own]) => evaluation(run, split, own, tree.stages)));
  }

  let again = 0; // when the records may be read once more: reading all of them takes a tenth of the time at most
  async function examine() {
    const began = performance.now();
    again = Infinity;
    try {
      const found = await get(`${address}/findings`);
      findings.replaceChildren(...(found.findings.length ? found.findings.map((one) => finding(run, one)) : [h("p", {}, "No rule has found anything.")]));
    } catch (error) {
      findings.replaceChildren(h("p", {class: "warning"}, error.message));
    }
    again = performance.now() + 9 * (performance.now() - began);
  }

  async function readNewest() {
    try {
      const answers = await get(`${address}/newest`);
      const [one] = answers;
      newest.replaceChildren(...(one ? [h("p", {class: "quiet"}, link(`#/run/${run.number}/group/${one.stage}/${one.step}/${one.group}`, `step ${counted(one.step)}`), " ", oneLine(lastWords(one.prompt)))] : [h("p", {class: "quiet"}, "There are none yet.")]),
        ...answers.map((own) => h("p", {}, h("b", {class: "n"}, scoreText(own.score)), " ", h("span", {class: "text", dir: "auto"}, oneLine(own.text)))));
    } catch (error) {
      newest.replaceChildren(h("p", {class: "warning"}, error.message));
    }
  }

  refresh();
  readNewest();
  examine();
  return {
    title: "overview", parent: "#/",
    node: h("section", {}, h("h1", {}, run.name), facts, h("div", {class: "columns"},
      h("div", {}, h("h2", {}, "held-out data, first and newest"), results, Object.keys(tree.evaluations).length ? null : h("p", {class: "quiet"}, "There was no evaluation yet."), h("h2", {}, "what the doctor says"), findings),
      h("div", {}, h("h2", {}, "newest answers"), newest, h("h2", {}, "recipe"), tree.recipe ? h("pre", {class: "recipe", tabindex: 0}, tree.recipe) : h("p", {class: "quiet"}, "It is not in the file.")))),
    update: async () => { tree = await get(`${address}/overview`); refresh(); readNewest(); if (performance.now() >= again) examine(); },
  };
}

function evaluation(run, split, {metrics, places}, stages) {
  const value = ([mean, low, high]) => `${short(mean)}${low === null ? "" : ` [${short(low)}, ${short(high)}]`}`;
  const moment = ([stage, step]) => `${step === 0 ? "before" : `after step ${step} of`} ${stages.length > 1 ? stages[stage]?.name ?? `stage ${counted(stage)}` : "training"}`;
  const one = places.first.join() === places.newest.join();
  return h("div", {class: "scrolling"}, h("table", {},
    h("thead", {}, h("tr", {}, h("th", {}, link(`#/run/${run.number}/held-out/${split}`, split || "held-out")), h("th", {}, moment(places.first)), one ? null : [h("th", {}, moment(places.newest)), h("th", {}, "change")])),
    h("tbody", {}, metrics.map((row) => h("tr", {}, h("td", {}, row.name), h("td", {}, value(row.first)), one ? null : [h("td", {}, h("b", {}, value(row.newest))), h("td", {}, row.first[0] === null || row.newest[0] === null ? "" : short(row.newest[0] - row.first[0]))])))));
}

function finding(run, one) {
  const steps = one.last_step > one.step ? `steps ${counted(one.step)} to ${counted(one.last_step)}` : `step ${counted(one.step)}`;
  return h("article", {class: "moment finding " + one.level},
    h("header", {}, h("b", {}, one.rule.replaceAll("_", " ")), h("span", {class: "flag"}, one.level), link(`#/run/${run.number}/step/${one.stage}/${one.step}`, steps), one.held_to_the_end ? null : h("span", {class: "quiet"}, "over before the end")),
    h("p", {}, one.what), one.remedy ? h("p", {class: "quiet"}, one.remedy) : null);
}
