// Filters of answers as words: "truncated", "-truncated", "score<0.5", "length>=100", "reward/final_answer=1", "error".
// The same meaning as in search.py.

const WORD = /^(-?)([A-Za-z_][\w./ -]*?)(?:(<=|>=|!=|<|>|=)(-?(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?))?$/i;
const TESTS = {
  "<": (one, other) => one < other,
  "<=": (one, other) => one <= other,
  ">": (one, other) => one > other,
  ">=": (one, other) => one >= other,
  "=": (one, other) => one === other,
  "!=": (one, other) => one !== other,
};
export const HELP = "score<0.5  length>100  surprise>1  spread>0  truncated  error  equal  -selected  reward/NAME=1";

// The filters of a text, as [name, operator, number]; throws an Error that says what is wrong.
export function parseFilters(text, names) {
  return text.trim().split(/\s+/).filter(Boolean).map((word) => {
    const match = WORD.exec(word);
    if (!match) throw new Error(`“${word}” is no filter; write for example: ${HELP}`);
    const [, minus, name, operator, value] = match;
    if (names && !names.includes(name)) throw new Error(`there is no “${name}”; there are ${names.join(", ")}`);
    if (operator === undefined) return [name, "=", minus ? 0 : 1];
    if (minus) throw new Error(`“${word}”: write - only before a word without a comparison`);
    return [name, operator, Number(value)];
  });
}

// The numbers of all answers of a step by name, from its columns.
export function numbersOf(columns) {
  const numbers = Object.create(null);
  for (const [name, column] of Object.entries(columns)) {
    if (name === "reward_components") {
      for (const [own, values] of Object.entries(column)) numbers["reward/" + own] = values;
    } else if (name === "error") {
      numbers.error = column.map((text) => (text ? 1 : 0));
    } else if (column.every((value) => value === null || typeof value !== "string")) {
      numbers[name] = column.map((value) => (typeof value === "boolean" ? Number(value) : value));
    }
  }
  const spread = new Map();
  for (const [group, rows] of groupsOf(columns)) {
    const scores = rows.map((row) => columns.score[row]).filter((score) => score !== null);
    const known = scores.length > 1; // one answer is not compared with any
    spread.set(group, known ? scores.reduce((a, b) => Math.max(a, b)) - scores.reduce((a, b) => Math.min(a, b)) : null);
  }
  numbers.spread = columns.group.map((group) => spread.get(group));
  numbers.equal = numbers.spread.map((value) => (value === null ? null : Number(value === 0)));
  return numbers;
}

// The rows of each group, in the order of their first answers.
export function groupsOf(columns) {
  const groups = new Map();
  columns.group.forEach((group, row) => {
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push(row);
  });
  return groups;
}

// The rows that meet all filters; a row that lacks the number meets none.
export function matching(numbers, amount, filters) {
  const rows = [];
  for (let row = 0; row < amount; row += 1) {
    const fits = filters.every(([name, operator, wanted]) => {
      const value = numbers[name]?.[row];
      return value !== null && value !== undefined && TESTS[operator](value, wanted);
    });
    if (fits) rows.push(row);
  }
  return rows;
}
