// A group side by side: the answers to one prompt by reward, with advantages, rewards, lengths, and what was left out.

import {count, counted, h, lastWords, link, long, mean, oneLine, promptText, scoreText, short, textBlock} from "./dom.js";
import {formulasButton, readingBlock} from "./formulas.js";
import {get} from "./source.js";

export async function groupView({run, parts, query, go, setQuery}) {
  const [stage, step, group] = parts.map(Number);
  const tree = await get(`runs/${run.number}/groups/${stage}/${step}/${group}`, true);
  const folded = fold(tree.answers);
  const sort = h("select", {"aria-label": "sort by", onchange: () => { setQuery({sort: sort.value === "score" ? "" : sort.value}); draw(); }},
    ...[["score", "best first"], ["-score", "worst first"], ["length", "longest first"], ["-length", "shortest first"], ["-index", "by number"]].map(([value, name]) => h("option", {value}, name)));
  const cards = h("div", {class: "cards"});
  const prompt = h("div");
  const toggle = formulasButton(() => read(!reading));
  let reading = false; // whether formulas are drawn
  let selected = 0;
  sort.value = query.get("sort") ?? "score";
  const advantages = tree.answers.map((answer) => answer.advantage).filter((value) => typeof value === "number");
  const most = Math.max(1e-12, ...advantages.map(Math.abs));
  const best = Math.max(...tree.answers.map((answer) => answer.score ?? -Infinity));

  function read(on) {
    reading = on;
    toggle.setAttribute("aria-pressed", String(on));
    setQuery({formulas: on ? "1" : ""});
    prompt.replaceChildren(block(promptText(tree.example.prompt)));
    draw();
  }

  function block(text, properties) {
    return reading ? readingBlock(text, properties) : textBlock(text, properties);
  }

  function draw() {
    const name = sort.value.replace(/^-/, "");
    const sign = sort.value.startsWith("-") ? 1 : -1;
    folded.sort((one, other) => sign * ((one.answer[name] ?? 0) - (other.answer[name] ?? 0)) || one.answer.index - other.answer.index);
    cards.replaceChildren(...folded.map((own, place) => card(own, place)));
    mark();
  }

  function card({answer, twins}, place) {
    const address = answerAddress(answer);
    const others = twins.slice(1);
    return h("article", {class: "card" + (answer.selected === false ? " left-out" : "") + (answer.kept ? "" : " closed"), title: answer.kept ? null : "its tokens were not kept (logs.traces in the recipe)", onclick: (event) => { if (!event.target.closest("a, details")) { selected = place; open(); } }},
      h("header", {},
        h("b", {class: answer.score === best && earned(answer) ? "score best" : "score"}, scoreText(answer.score)),
        h("span", {class: "quiet"}, answer.kept ? link(address, `answer ${answer.index}`) : `answer ${answer.index}`, twins.length > 1 ? h("span", {class: "times"}, ` ×${twins.length}`) : ""),
        side(answer),
        answer.truncated ? h("span", {class: "flag"}, "truncated") : null,
        answer.error ? h("span", {class: "flag"}, "error") : null),
      tree.pair || (!answer.kept && answer.texts) ? null : bar(answer.advantage, most),
      h("dl", {class: "parts"},
        Object.entries(answer.reward_components).map(([name, value]) => [h("dt", {}, name), h("dd", {}, short(value))]),
        h("dt", {}, "length"), h("dd", {}, count(answer.length, "token")),
        answer.turns > 1 ? [h("dt", {}, "turns"), h("dd", {}, String(answer.turns))] : null,
        answer.stops?.length ? [h("dt", {}, "ended by"), h("dd", {}, answer.stops.at(-1))] : null,
        typeof answer.surprise === "number" ? [h("dt", {}, "surprise"), h("dd", {}, short(answer.surprise))] : null),
      answer.selected === false ? h("p", {class: "reason"}, `Not trained on: ${answer.reason || "it was not selected"}.`) : null,
      answer.error ? textBlock(answer.error, {class: "reason"}) : null,
      answer.texts ? answer.texts.map((text) => block(text, {class: "answer"})) : h("p", {class: "quiet"}, "Its text was not kept (logs.traces in the recipe)."),
      others.length ? h("p", {class: "quiet"}, "the same text: ", others.map((twin) => [twin.kept ? link(answerAddress(twin), `answer ${twin.index}`) : `answer ${twin.index}`, " "])) : null);
  }

  // Of a pair: which side an answer is, and what the policy gives it.
  function side({index}) {
    const name = ["chosen", "rejected"].find((own) => tree.pair?.[own] === index);
    return name ? h("b", {class: "side " + name, title: "log-probability, less the reference's if there is one"}, `${name} ${short(tree.pair.scores[index])}`) : null;
  }

  function answerAddress(answer) {
    return `#/run/${run.number}/answer/train/${stage}/${step}/${answer.index}${reading ? "?formulas=1" : ""}`;
  }

  // Whether the main reward was earned: shaping rewards alone make no score green.
  function earned(answer) {
    return (answer.reward_components[tree.main] ?? answer.score) > 0;
  }

  function open() {
    const {answer, twins} = folded[selected];
    const whole = [answer, ...twins].find((own) => own.kept);
    if (whole) go(answerAddress(whole));
  }

  function mark(scroll) {
    [...cards.children].forEach((element, place) => element.classList.toggle("selected", place === selected));
    if (scroll) cards.children[selected]?.scrollIntoView({block: "nearest"});
  }

  function move(by) {
    selected = Math.max(0, Math.min(folded.length - 1, selected + by));
    mark(true);
  }

  const scores = tree.answers.map((answer) => answer.score).filter((score) => score !== null);
  const center = mean(scores);
  const deviation = scores.length > 1 ? Math.sqrt(scores.reduce((sum, score) => sum + (score - center) ** 2, 0) / (scores.length - 1)) : null;
  const references = tree.example.references ?? [];
  const node = h("section", {},
    h("h1", {}, `group ${group} `, h("span", {class: "quiet"}, "of ", link(`#/run/${run.number}/step/${stage}/${step}`, `step ${counted(step)}`))),
    h("p", {class: "facts"},
      h("span", {}, count(tree.answers.length, "answer")), h("span", {}, "different ", h("b", {}, String(folded.length))),
      h("span", {}, "mean score ", h("b", {}, short(center))), h("span", {}, "deviation ", h("b", {}, short(deviation))),
      tree.pair ? h("span", {title: "what the policy gives the chosen answer less what it gives the rejected one, in nats"}, "margin ", h("b", {}, short(tree.pair.margin))) : null,
      h("span", {}, "left out ", h("b", {}, String(tree.answers.filter((answer) => answer.selected === false).length))),
      h("span", {class: "quiet"}, String(tree.example.id ?? ""))),
    "prompt" in tree.example ? h("details", {class: "prompt-box", open: !long(promptText(tree.example.prompt))}, h("summary", {}, "prompt", h("span", {class: "last-words", dir: "auto"}, oneLine(lastWords(tree.example.prompt)))), prompt) : null,
    references.length ? h("details", {class: "prompt-box", open: references.join("").length < 400}, h("summary", {}, count(references.length, "reference")), references.map((reference) => textBlock(reference))) : null,
    h("div", {class: "bar"}, sort, toggle, h("span", {class: "quiet"}, tree.pair ? "the loss compares the best and the worst" : "bars are mean advantages; equal texts are one card")), cards);
  read(Boolean(query.get("formulas")));
  return {
    title: `group ${group}`, node, parent: `#/run/${run.number}/step/${stage}/${step}`,
    place: () => ({selected, top: window.scrollY}),
    restore: (place) => { if (place) { selected = place.selected; mark(); window.scrollTo(0, place.top); } },
    keys: {j: () => move(1), k: () => move(-1), l: open, Enter: open, m: () => read(!reading), "/": () => sort.focus()},
    help: [["j k", "next, previous answer"], ["l", "open it"], ["m", "formulas, or the texts as they are"]],
  };
}

// Answers of equal texts as one; those without texts stay alone.
function fold(answers) {
  const byText = new Map();
  for (const answer of answers) {
    const key = answer.texts ? JSON.stringify([answer.texts, answer.score, answer.selected]) : answer.index;
    if (!byText.has(key)) byText.set(key, []);
    byText.get(key).push(answer);
  }
  return [...byText.values()].map((twins) => ({answer: twins[0], twins}));
}

// A bar from the middle: to the right for a positive advantage.
function bar(advantage, most) {
  if (typeof advantage !== "number") return h("div", {class: "advantage none"}, h("span", {class: "quiet"}, "no advantage recorded"));
  const width = `${Math.round(50 * Math.abs(advantage) / most)}%`;
  const own = h("i", {class: advantage < 0 ? "down" : "up", style: {width, [advantage < 0 ? "right" : "left"]: "50%"}});
  return h("div", {class: "advantage", title: "mean advantage of its tokens"}, h("div", {class: "track"}, own), h("span", {}, (advantage > 0 ? "+" : "") + short(advantage)));
}
