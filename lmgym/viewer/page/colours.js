// Which numbers of tokens can be shown as colours, and how strong the colour of each token is.

import {number} from "./dom.js";

const PREFERRED = ["probability", "advantages", "push", "ratio/mean", "ratio/clipped", "entropy", "token_rewards"];
const MEANING = {
  __proto__: null,
  probability: "probability with which it was sampled: the weaker the colour, the surer",
  advantages: "advantage: above 0 the update makes it likelier",
  push: "how hard the update pushes its log-probability, weights included",
  "ratio/mean": "ratio to the policy that sampled it, 1 is unchanged",
  "ratio/clipped": "its gradient was removed by the clip",
  entropy: "entropy of its distribution, in nats",
  gap: "trainer's log-probability less the sampler's",
  "kl to the reference": "log-probability less the reference's",
  token_rewards: "reward that it earned",
  version: "updates of the weights that sampled it",
};

// The columns of a row, with those that follow from others; `derived` are the explanation's.
export function allColumns(row, derived) {
  const columns = {...row.columns};
  for (const name of ["push"]) if (derived?.[name]) columns[name] = derived[name];
  const sampler = row.columns.logprobs_sampler;
  const trainer = row.columns.logprobs;
  const now = trainer ?? sampler;
  const each = (one, other) => one.map((value, place) => (value === null || other[place] === null ? null : value - other[place]));
  if (sampler) columns.probability = sampler.map((value) => (value === null ? null : Math.exp(value)));
  if (sampler && trainer) columns.gap = each(trainer, sampler);
  if (now && row.columns.logprobs_ref) columns["kl to the reference"] = each(now, row.columns.logprobs_ref);
  return columns;
}

// Names of columns that some row has and that differ between tokens or say something anyway, the most telling first.
export function colourNames(rows) {
  const names = [...new Set(rows.flatMap((columns) => Object.keys(columns)))];
  const rank = (name) => (PREFERRED.includes(name) ? PREFERRED.indexOf(name) : PREFERRED.length);
  return names.sort((one, other) => rank(one) - rank(other) || one.localeCompare(other));
}

// How to colour by a column: {shade(value) -> [class, share of the colour in per cent], legend: [[text, class, share]]}.
export function shading(name, rows) {
  const values = rows.flatMap((columns) => columns[name] ?? []).filter((value) => value !== null);
  const title = MEANING[name] ?? name;
  if (name === "probability") {
    return {title, shade: (value) => ["heat", 100 * (1 - value)], legend: [["1", "heat", 0], ["0.5", "heat", 50], ["0", "heat", 100]]};
  }
  const center = name.startsWith("ratio/") && !/clipped|gate/.test(name) ? 1 : 0;
  const least = values.reduce((one, other) => Math.min(one, other), center);
  const most = values.reduce((one, other) => Math.max(one, other), center);
  const reach = Math.max(most - center, center - least);
  if (!(reach > 0)) return {title, shade: () => ["heat", 0], legend: [[`all ${number(center)}`, "heat", 0]]};
  if (least >= center) {
    return {title, shade: (value) => ["up", 100 * (value - center) / reach], legend: [[number(center), "up", 0], [number(most), "up", 100]]};
  }
  if (most <= center) {
    return {title, shade: (value) => ["down", 100 * (center - value) / reach], legend: [[number(least), "down", 100], [number(center), "down", 0]]};
  }
  const shade = (value) => (value < center ? ["down", 100 * (center - value) / reach] : ["up", 100 * (value - center) / reach]);
  return {title, shade, legend: [[number(center - reach), "down", 100], [number(center), "up", 0], [number(center + reach), "up", 100]]};
}
