// Looking for answers through all steps: numbers and a regular expression, in the background.

import {background} from "./background.js";
import {count, counted, h, link, number, say} from "./dom.js";
import {HELP, parseFilters} from "./filter.js";
import {virtualList} from "./list.js";
import {isFile, leftOut} from "./source.js";

export async function searchView({run, query, go, setQuery}) {
  const title = "search";
  if (isFile) return {title, parent: "#/", node: h("section", {}, h("h1", {}, title), h("p", {}, `A file cannot search; \`lmgym view\` can. ${leftOut}`))};
  const pattern = h("input", {type: "search", class: "grow", placeholder: "regular expression over the answers", "aria-label": "regular expression", value: query.get("pattern") ?? ""});
  const filter = h("input", {type: "search", class: "grow", placeholder: "filter: " + HELP, "aria-label": "filter", title: HELP, value: query.get("filter") ?? ""});
  const seconds = h("input", {type: "number", min: 1, max: 600, value: query.get("seconds") ?? 60, "aria-label": "seconds"});
  const start = h("button", {type: "submit"}, "Search");
  const stop = h("button", {type: "button", hidden: true, onclick: cancel}, "Cancel");
  const said = h("p", {class: "quiet", role: "status"});
  const list = virtualList({height: 54, row: element, open, label: "answers that were found"});
  const work = background({address: "searches", look, failed: warn});
  let found = [];

  function element(place) {
    const own = found[place];
    const text = own.found ? [own.found[0], h("mark", {}, own.found[1]), own.found[2]] : [own.kept ? "" : "its tokens were not kept"];
    return h("div", {class: "group-row short"}, h("span", {class: "id"}, `${counted(own.stage)}/${counted(own.step)}`), h("span", {class: "prompt", dir: "auto"}, text), h("b", {class: "n"}, number(own.score)), h("span", {class: "prompt"}, `answer ${own.index}, ${count(own.length, "token")}`));
  }

  function open(place) {
    const own = found[place];
    const at = own.kept ? `answer/train/${own.stage}/${own.step}/${own.index}` : `group/${own.stage}/${own.step}/${own.group}`;
    go(`#/run/${run.number}/${at}`);
  }

  async function begin(event) {
    event?.preventDefault();
    await cancel();
    setQuery({pattern: pattern.value, filter: filter.value.trim(), seconds: seconds.value === "60" ? "" : seconds.value});
    let filters;
    try { filters = parseFilters(filter.value); } catch (error) { warn(error); return; }
    said.classList.remove("warning");
    await work.begin({run: run.number, pattern: pattern.value, filters, seconds: Number(seconds.value)});
  }

  function warn(error) {
    stop.hidden = true;
    say(said, error.message);
    said.classList.add("warning");
  }

  function look(tree) {
    const more = tree.found.length !== found.length || !tree.found.length;
    found = tree.found;
    if (more) list.show(found.length); // else a click just now would miss its row
    const far = tree.steps ? `${tree.searched.toLocaleString("en")} of ${count(tree.steps, "step")} searched` : "looking";
    say(said, `${count(found.length, "answer")} found, ${far}${tree.sentence ? "; " + tree.sentence : ""}`);
    stop.hidden = tree.done;
  }

  async function cancel() {
    if (!(await work.cancel())) return;
    stop.hidden = true;
    said.textContent += "; cancelled";
  }

  if (pattern.value || filter.value) begin();
  return {
    title, parent: "#/", leave: cancel, place: list.place,
    node: h("section", {class: "filling"}, h("h1", {}, title), h("p", {class: "quiet"}, `Looks through the steps of ${run.name}, the newest first; `, link(`#/run/${run.number}/held-out`, "held-out answers"), " are not searched."),
      h("form", {class: "bar", onsubmit: begin}, pattern, filter, h("label", {}, seconds, " s"), start, stop), said, list.node),
    keys: {...list.keys, "/": () => pattern.focus()}, help: [["/", "regular expression"], ["j k l", "next, previous, open"]],
  };
}
