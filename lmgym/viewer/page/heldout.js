// The same held-out prompts through training.

import {differenceBlock} from "./diff.js";
import {count, counted, h, lastWords, link, long, number, oneLine, promptText, scoreText, short, textBlock} from "./dom.js";
import {virtualList} from "./list.js";
import {get} from "./source.js";

export async function heldOutView({run, parts, go}) {
  const split = parts.join("/");
  const address = `runs/${run.number}/evaluations${split ? "/" + split : ""}`;
  let tree = await get(address);
  const list = virtualList({height: 54, row: element, open, label: "held-out prompts"});
  const said = h("p", {class: "facts"});

  function element(place) {
    const own = tree.prompts[place];
    return h("div", {class: "group-row short"}, h("span", {class: "id"}, String(own.index)), h("span", {class: "prompt", dir: "auto"}, oneLine(lastWords(own.example.prompt))),
      h("b", {class: "n"}, short(own.score)), h("span", {class: "prompt", dir: "auto"}, oneLine(own.texts.at(-1) ?? "")));
  }

  function open(place) {
    go(`#/run/${run.number}/prompt/${tree.split}/${encodeURIComponent(tree.prompts[place].example.id)}`);
  }

  function refresh() {
    const at = tree.moments.at(-1);
    said.replaceChildren(h("span", {}, `${count(tree.moments.length, "evaluation")}, the newest after step ${at.step} of stage ${counted(at.stage)}`), h("span", {}, count(tree.prompts.length, "prompt")),
      ...tree.splits.map((name) => (name === tree.split ? h("b", {}, name) : link(`#/run/${run.number}/held-out/${name}`, name))));
    list.show(tree.prompts.length);
  }

  refresh();
  return {
    title: "held-out prompts", parent: "#/", place: list.place, restore: list.restore,
    node: h("section", {class: "filling"}, h("h1", {}, "held-out prompts"), said, h("div", {class: "heads short"}, ["", "prompt", "score", "newest answer"].map((name) => h("span", {}, name))), list.node),
    keys: list.keys, help: [["j k", "next, previous prompt"], ["l", "its answers through training"]],
    update: async () => { tree = await get(address); refresh(); },
  };
}

export async function promptView({run, parts, query, setQuery}) {
  const [split, ...example] = parts;
  const address = `runs/${run.number}/prompts/${split}/${example.join("/")}`;
  let tree = await get(address);
  const base = h("select", {"aria-label": "compare with", onchange: () => { setQuery({with: base.value === "before" ? "" : base.value}); refresh(); }},
    h("option", {value: "before"}, "changes since the evaluation before"), h("option", {value: "first"}, "changes since the first one"), h("option", {value: "none"}, "texts as they are"), h("option", {value: "sides"}, "first and newest side by side"));
  const steps = h("div", {class: "timeline"});
  let selected = 0;
  base.value = query.get("with") ?? "before";

  function refresh() {
    const whole = (answer) => answer.texts.join("\n");
    let repeats = 0;
    const items = [];
    const sides = base.value === "sides" && tree.answers.length > 1;
    steps.classList.toggle("sides", sides);
    tree.answers.forEach((answer, place) => {
      if (sides && place > 0 && place < tree.answers.length - 1) return;
      const earlier = place === 0 || base.value === "none" || sides ? null : whole(tree.answers[base.value === "first" ? 0 : place - 1]);
      const same = place > 0 && base.value === "before" && earlier === whole(answer);
      repeats = same ? repeats + 1 : 0;
      const to = `#/run/${run.number}/answer/evaluation/${answer.stage}/${answer.step}/${answer.index}/${split}`;
      items.push(h("article", {class: same ? "moment same" : "moment"},
        h("header", {}, link(to, `stage ${counted(answer.stage)}, after step ${answer.step}`), h("b", {class: "score"}, scoreText(answer.score)),
          Object.entries(answer.reward_components).map(([name, value]) => h("span", {class: "quiet"}, `${name} ${number(value)}`)), h("span", {class: "quiet"}, answer.stops.at(-1) ?? ""), answer.texts.length === 1 ? link(`#/run/${run.number}/ask/why?${new URLSearchParams({example: tree.example.id, answer: answer.texts[0], stage: answer.stage})}`, "why?") : null),
        same ? h("p", {class: "quiet"}, "the same text") : differenceBlock(earlier, whole(answer))));
    });
    steps.replaceChildren(...items);
    mark();
  }

  function mark(scroll) {
    [...steps.children].forEach((element, place) => element.classList.toggle("selected", place === selected));
    if (scroll) steps.children[selected]?.scrollIntoView({block: "nearest"});
  }

  function move(by) {
    selected = Math.max(0, Math.min(steps.children.length - 1, selected + by));
    mark(true);
  }

  const references = tree.example.references ?? [];
  refresh();
  return {
    title: "a prompt through training", parent: `#/run/${run.number}/held-out/${split}`,
    node: h("section", {}, h("h1", {}, "a prompt through training"), h("p", {class: "quiet"}, `${tree.example.id} of ${split}`),
      h("details", {class: "prompt-box", open: !long(promptText(tree.example.prompt))}, h("summary", {}, "prompt", h("span", {class: "last-words", dir: "auto"}, oneLine(lastWords(tree.example.prompt)))), textBlock(promptText(tree.example.prompt))),
      references.length ? h("details", {class: "prompt-box", open: references.join("").length < 400}, h("summary", {}, count(references.length, "reference")), references.map((reference) => textBlock(reference))) : null,
      h("div", {class: "bar"}, base), steps),
    keys: {j: () => move(1), k: () => move(-1), l: () => steps.children[selected]?.querySelector("a")?.click()},
    help: [["j k", "next, previous evaluation"], ["l", "open the answer"]],
    update: async () => { tree = await get(address); refresh(); },
  };
}
