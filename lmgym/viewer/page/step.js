// A step: its groups or its answers, to be filtered and sorted; shares of what is often wrong.

import {count, counted, h, lastWords, link, mean, number, oneLine, percent, say, short} from "./dom.js";
import {HELP, groupsOf, matching, numbersOf, parseFilters} from "./filter.js";
import {virtualList} from "./list.js";
import {get} from "./source.js";
import {answersTable} from "./table.js";

const SHARES = [["truncated", "truncated"], ["equal", "equal groups"], ["error", "errors"], ["-selected", "not trained on"]];
const SUMMARY = ["reward", "length/mean", "entropy", "kl/old", "ratio/clipped", "gradient_norm", "learning_rate", "seconds"];
const DOTS = 24; // scores of a group that are drawn
const SETTLED = 120; // ms without scrolling before the prompts of what is seen are read

export async function stepView({run, parts, query, go, setQuery}) {
  const [stage, step] = parts.map(Number);
  const here = `#/run/${run.number}`;
  const tree = await get(`runs/${run.number}/steps/${stage}/${step}`);
  const numbers = numbersOf(tree.columns);
  const groups = groupsOf(tree.columns);
  const written = new Set(tree.texts); // answers of which the text was kept without the tokens
  const readable = (row) => tree.columns.kept[row] || written.has(tree.columns.index[row]);
  const what = h("select", {"aria-label": "list", onchange: change}, h("option", {value: "groups"}, "groups"), h("option", {value: "answers"}, "answers"), h("option", {value: "table"}, "table"));
  const sort = h("select", {"aria-label": "sort by", onchange: change});
  const box = h("input", {type: "search", class: "grow", placeholder: "filter (/): " + HELP, "aria-label": "filter", oninput: change, title: HELP});
  const said = h("p", {class: "quiet", role: "status"});
  const heads = h("div", {class: "heads"});
  let rows = []; // of the list: groups as lists of rows, or rows
  const prompts = new Map(); // of groups whose answers were kept
  const texts = new Map(); // of answers, by their index
  const list = virtualList({height: 54, row: element, open, seen: (first, last) => what.value !== "table" && readPrompts(first, last), label: "groups or answers of the step"});
  const table = answersTable({numbers, indices: tree.columns.index, columns: query.get("columns") ?? "", open: openAnswer, seen: (first, last) => what.value === "table" && readPrompts(first, last), changed: (columns) => setQuery({columns}),
    sortBy: (name) => { sort.value = sort.value === name && name !== "index" ? "-" + name : name; change(); }});
  const names = Object.keys(numbers).filter((name) => !["index", "group", "kept"].includes(name) && numbers[name].some((value) => value !== null));

  const scores = numbers.score.filter((score) => score !== null);
  const low = scores.reduce((one, other) => Math.min(one, other), Infinity);
  const high = scores.reduce((one, other) => Math.max(one, other), -Infinity);

  what.value = query.get("list") ?? "groups";
  sort.append(h("option", {value: "index"}, "sort: number"), ...names.map((name) => h("option", {value: name}, `sort: ${name}`)), ...names.map((name) => h("option", {value: "-" + name}, `sort: ${name}, largest first`)));
  sort.value = query.get("sort") ?? "index";
  box.value = query.get("filter") ?? "";

  function change() {
    setQuery({list: what.value === "groups" ? "" : what.value, sort: sort.value === "index" ? "" : sort.value, filter: box.value.trim()});
    refresh();
  }

  function refresh() {
    let filters;
    try {
      filters = parseFilters(box.value, Object.keys(numbers));
    } catch (error) {
      say(said, error.message);
      said.classList.add("warning");
      return;
    }
    said.classList.remove("warning");
    const fitting = matching(numbers, tree.columns.index.length, filters);
    const chosen = new Set(fitting);
    if (what.value === "groups") {
      rows = [...groups.values()].filter((own) => own.some((row) => chosen.has(row)));
      rows = sorted(rows, (own, name) => mean(own.map((row) => numbers[name][row]).filter((value) => value !== null)));
    } else {
      rows = sorted(fitting, (row, name) => numbers[name][row]);
    }
    const asTable = what.value === "table";
    [list.node.hidden, heads.hidden, table.node.hidden] = [asTable, asTable, !asTable];
    const all = what.value === "groups" ? groups.size : tree.columns.index.length;
    said.textContent = filters.length ? `${count(rows.length, what.value === "groups" ? "group" : "answer")} of ${all.toLocaleString("en")}` : "";
    heads.replaceChildren(...(what.value === "groups" ? groupHeads() : answerHeads()));
    if (asTable) table.show(rows, texts);
    else list.show(rows.length);
  }

  const shownList = () => (what.value === "table" ? table.list : list);

  function sorted(items, valueOf) {
    const name = sort.value.replace(/^-/, "");
    if (name === "index") return items;
    const sign = sort.value.startsWith("-") ? -1 : 1;
    const value = (item) => valueOf(item, name) ?? Infinity * sign;
    return items.map((item) => [value(item), item]).sort(([one], [other]) => sign * (one - other)).map(([, item]) => item);
  }

  function element(place) {
    return what.value === "groups" ? groupRow(rows[place]) : answerRow(rows[place]);
  }

  function groupRow(own) {
    const group = tree.columns.group[own[0]];
    const of = (name) => own.map((row) => numbers[name]?.[row] ?? null).filter((value) => value !== null);
    const prompt = prompts.get(group) ?? "";
    const left = of("selected").filter((value) => !value).length;
    const flags = [
      of("equal")[0] ? flag("equal") : null,
      sum(of("truncated")) ? flag(`${sum(of("truncated"))} truncated`) : null,
      sum(of("error")) ? flag(count(sum(of("error")), "error")) : null,
      left ? flag(left === own.length ? "not trained on" : `${left} not trained on`) : null,
    ];
    const open = own.some(readable);
    return h("div", {class: open ? "group-row" : "group-row no-text", title: open ? null : "only numbers of it were kept (logs.traces in the recipe)"},
      h("span", {class: "id"}, `#${group}`, own.some((row) => tree.columns.kept[row]) ? h("i", {title: "its tokens were kept"}, " ●") : ""),
      h("span", {class: "prompt", dir: "auto"}, prompt || tree.columns.example[own[0]]),
      scoreDots(of("score")), h("b", {class: "n"}, short(mean(of("score")))), h("span", {class: "n"}, short(mean(of("length")))),
      h("span", {class: "n"}, short(mean(of("surprise")))), h("span", {class: "flags"}, flags));
  }

  function answerRow(row) {
    const own = (name) => tree.columns[name]?.[row];
    const flags = [own("truncated") ? flag("truncated") : null, own("error") ? flag("error") : null, own("selected") === false ? flag(own("reason") || "not trained on") : null];
    return h("div", {class: readable(row) ? "group-row" : "group-row no-text"},
      h("span", {class: "id"}, `${own("index")}`, own("kept") ? h("i", {title: "its tokens were kept"}, " ●") : ""),
      h("span", {class: "two"}, h("span", {class: "prompt quiet", dir: "auto"}, `#${own("group")} `, prompts.get(own("group")) || own("example")), h("span", {class: "prompt", dir: "auto"}, texts.get(own("index")) ?? (readable(row) ? "…" : "its text was not kept"))),
      scoreDots([own("score")]), h("b", {class: "n"}, short(own("score"))), h("span", {class: "n"}, short(own("length"))),
      h("span", {class: "n"}, short(own("surprise"))), h("span", {class: "flags"}, flags));
  }

  function scoreDots(scores) {
    const ordered = [...scores].sort((one, other) => other - one);
    const more = ordered.length > DOTS ? h("span", {class: "quiet"}, `+${ordered.length - DOTS}`) : null;
    return h("span", {class: "dots"}, ordered.slice(0, DOTS).map((score) => h("i", {title: number(score), style: {"--share": `${high > low ? Math.round(100 * (score - low) / (high - low)) : 50}%`}})), more);
  }

  let timer = 0;
  function readPrompts(first, last) {
    if (tree.note) return; // of an old folder: one group or few, read with the first look
    clearTimeout(timer);
    timer = setTimeout(async () => {
      const wanted = new Set();
      for (const item of rows.slice(first, last)) {
        const row = what.value === "groups" ? item.find(readable) : readable(item) ? item : undefined;
        if (row !== undefined && !prompts.has(tree.columns.group[row])) wanted.add(row);
      }
      for (const row of wanted) {
        const group = tree.columns.group[row];
        if (prompts.has(group)) continue;
        prompts.set(group, "");
        try {
          const whole = await get(`runs/${run.number}/groups/${stage}/${step}/${group}`, true);
          prompts.set(group, oneLine(lastWords(whole.example.prompt)));
          for (const answer of whole.answers) if (answer.texts) texts.set(answer.index, oneLine(answer.texts.join(" ⏎ ")));
        } catch { continue; } // not in a file that was made with a limit
      }
      if (wanted.size) shownList().redraw();
    }, SETTLED);
  }

  function open(place) {
    if (what.value === "groups") go(`${here}/group/${stage}/${step}/${tree.columns.group[rows[place][0]]}`);
    else openAnswer(rows[place]);
  }

  function openAnswer(row) {
    go(`${here}/${tree.columns.kept[row] ? `answer/train/${stage}/${step}/${tree.columns.index[row]}` : `group/${stage}/${step}/${tree.columns.group[row]}`}`);
  }

  let [before, after] = tree.neighbours;
  const heading = h("h1");
  const around = (place, sign) => (place ? link(`${here}/step/${place.join("/")}`, sign) : h("span", {class: "quiet"}, sign));
  const head = () => heading.replaceChildren(around(before, "‹"), ` step ${counted(step)} of ${tree.stage_name || `stage ${counted(stage)}`} `, around(after, "›"), " ", link(`${here}/ask/what-if?stage=${stage}&step=${counted(step)}`, "what if?"));
  const node = h("section", {class: "filling"},
    heading,
    h("p", {class: "facts"}, SUMMARY.filter((name) => name in tree.metrics).map((name) => h("span", {}, `${name} `, h("b", {}, short(tree.metrics[name]))))),
    secondsBar(tree.metrics),
    tree.note && h("p", {class: "quiet"}, tree.note),
    h("p", {class: "facts"}, h("span", {}, `${count(tree.columns.index.length, "answer")} in ${count(groups.size, "group")}`), shareButtons(numbers, toggle)),
    h("div", {class: "bar"}, what, sort, box), said, heads, list.node, table.node);
  head();
  refresh();

  function toggle(word) {
    const words = box.value.trim().split(/\s+/).filter(Boolean);
    box.value = (words.includes(word) ? words.filter((own) => own !== word) : [...words, word]).join(" ");
    change();
  }

  return {
    title: `step ${counted(step)}`, node, parent: "#/", place: () => shownList().place(), restore: (place) => shownList().restore(place),
    keys: {...Object.fromEntries(Object.keys(list.keys).map((key) => [key, () => shownList().keys[key]()])), "/": () => box.focus(), "[": () => before && go(`${here}/step/${before.join("/")}`), "]": () => after && go(`${here}/step/${after.join("/")}`)},
    help: [["j k", "next, previous row"], ["l", "open it"], ["[ ]", "previous, next step"], ["/", "filter"]],
    update: async () => { // the next step may be there by now
      [before, after] = (await get(`runs/${run.number}/steps/${stage}/${step}`)).neighbours;
      head();
    },
  };
}

function shareButtons(numbers, toggle) {
  return SHARES.filter(([word]) => numbers[word.replace("-", "")]?.some((value) => value !== null)).map(([word, name]) => {
    const values = numbers[word.replace("-", "")];
    const share = mean(values.map((value) => (word.startsWith("-") ? 1 - value : value)));
    return h("button", {class: "chip", onclick: () => toggle(word), title: "filter by it"}, `${name} ${percent(share)}`);
  });
}

// Where a step's seconds went, as a bar of its parts; what is in no part is "other".
function secondsBar(metrics) {
  const whole = metrics.seconds;
  const parts = Object.entries(metrics).filter(([name]) => /^seconds\/[^/]+$/.test(name)).map(([name, value]) => [name.slice(8), value]);
  const rest = whole - sum(parts.map(([, value]) => value));
  if (!(whole > 0) || !parts.length || rest < -0.01 * whole) return null;
  const all = [...parts, ["other", Math.max(0, rest)]].filter(([, value]) => value > 0.01 * whole);
  const words = all.map(([name, value]) => `${name} ${short(value)} s`);
  return h("div", {class: "seconds-bar", role: "img", "aria-label": `seconds of the step: ${words.join(", ")}`}, all.map(([, value], place) => h("span", {class: `c${place % 6}`, title: words[place], style: {"flex-grow": String(value)}}, words[place])));
}

function groupHeads() {
  return ["group", "prompt", "scores", "mean", "length", "surprise", ""].map((name) => h("span", {}, name));
}

function answerHeads() {
  return ["number", "prompt and answer", "", "score", "length", "surprise", ""].map((name) => h("span", {}, name));
}

function flag(text) {
  return h("span", {class: "flag", title: text}, text);
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}
