// LaTeX as MathML, which the browser draws itself. A formula that is not understood whole stays as it was written.

import {mathml, shown} from "./dom.js";

export const LONGEST = 4000; // characters of a formula
export const DEEPEST = 40; // groups in each other

const LATEX_TOKEN = /\\[A-Za-z]+|\\[^]|\s+|[^]/gu;

// Symbols by what MathML makes of them: letters (which it slants), upright signs, operators, and large operators with limits.
const LETTERS = pairs(`alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ mu μ nu ν xi ξ pi π
  varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω partial ∂ ell ℓ hbar ℏ imath ı jmath ȷ`);
const UPRIGHT = pairs(`Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω infty ∞ nabla ∇ emptyset ∅ varnothing ∅ aleph ℵ
  Re ℜ Im ℑ angle ∠ triangle △ square □ Box □ blacksquare ■ checkmark ✓ top ⊤ bot ⊥ degree ° circ ∘ prime ′ \\% % % % \\$ $ \\# # \\_ _ \\& & backslash \\ ? ? @ @ / /
  dots … ldots … dotsc … cdots ⋯ dotsb ⋯ vdots ⋮ ddots ⋱ . . forall ∀ exists ∃ nexists ∄ star ⋆ bullet • heartsuit ♡ pounds £ wp ℘`);
const OPERATORS = pairs(`+ + - − * ∗ = = < < > > , , ; ; : : ! ! cdot ⋅ times × div ÷ pm ± mp ∓ ast ∗ le ≤ leq ≤ leqslant ⩽ ge ≥ geq ≥ geqslant ⩾
  lt < gt > ll ≪ gg ≫ ne ≠ neq ≠ approx ≈ equiv ≡ cong ≅ sim ∼ simeq ≃ propto ∝ doteq ≐ triangleq ≜ coloneqq ≔ to → gets ← rightarrow → leftarrow ←
  leftrightarrow ↔ Rightarrow ⇒ Leftarrow ⇐ Leftrightarrow ⇔ longrightarrow ⟶ longleftarrow ⟵ Longrightarrow ⟹ Longleftrightarrow ⟺ implies ⟹
  impliedby ⟸ iff ⟺ mapsto ↦ longmapsto ⟼ hookrightarrow ↪ frown ⌢ uparrow ↑ downarrow ↓ in ∈ notin ∉ ni ∋ subset ⊂ subseteq ⊆ subsetneq ⊊ supset ⊃ supseteq ⊇ cup ∪ cap ∩ setminus ∖
  land ∧ wedge ∧ lor ∨ vee ∨ neg ¬ lnot ¬ oplus ⊕ otimes ⊗ odot ⊙ mid ∣ nmid ∤ parallel ∥ perp ⊥ prec ≺ succ ≻ models ⊨ vdash ⊢ therefore ∴ because ∵
  colon : bmod mod dagger † vartriangle △ asymp ≍ lesssim ≲ gtrsim ≳`);
const LARGE = pairs("sum ∑ prod ∏ coprod ∐ bigcup ⋃ bigcap ⋂ bigsqcup ⨆ bigoplus ⨁ bigotimes ⨂ bigvee ⋁ bigwedge ⋀");
const INTEGRALS = pairs("int ∫ iint ∬ iiint ∭ oint ∮");
const LIMITS = commandNames("lim limsup liminf max min sup inf argmax argmin det gcd Pr"); // functions with a text below them
const FUNCTIONS = new Set([...LIMITS, ...commandNames("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth log ln lg exp arg deg dim hom ker")]);
const DELIMITERS = pairs(`( ( ) ) [ [ ] ] | | \\{ { \\} } \\| ‖ \\lbrace { \\rbrace } \\langle ⟨ \\rangle ⟩ \\lfloor ⌊ \\rfloor ⌋ \\lceil ⌈ \\rceil ⌉ \\vert | \\lvert | \\rvert |
  \\Vert ‖ \\lVert ‖ \\rVert ‖ \\lbrack [ \\rbrack ]`);
const ONLY_DELIMITERS = pairs("/ / < ⟨ > ⟩ \\uparrow ↑ \\downarrow ↓ \\backslash \\"); // behind \left and \big, elsewhere operators
const ACCENTS = pairs(`hat ^ widehat ^ bar ¯ tilde ~ widetilde ~ dot ˙ ddot ¨ vec → overrightarrow → overleftarrow ←`);
const BRACES = pairs("overbrace ⏞ underbrace ⏟");
const SPACES = pairs("\\, 0.167 \\: 0.222 \\> 0.222 \\; 0.278 \\! -0.167 \\quad 1 \\qquad 2 ~ 0.333 thinspace 0.167 enspace 0.5");
const SIZES = new Map([["big", 1.2], ["Big", 1.8], ["bigg", 2.4], ["Bigg", 3]]);
const TEXTS = pairs("text plain textrm plain textnormal plain textsf plain mbox plain textbf bold textit slanted texttt typed");
const BOXES = pairs("boxed boxed cancel cancelled overline overlined underline underlined");

// Alphabets of Unicode: where A, a and 0 begin, and the letters that stand elsewhere.
const SCRIPT = [0x1d49c, 0x1d4b6, null, "BℬEℰFℱHℋIℐLℒMℳRℛeℯgℊoℴ"];
const BOLD = [0x1d468, 0x1d482, 0x1d7ce, ""];
const ALPHABETS = new Map(Object.entries({
  "\\mathbf": [0x1d400, 0x1d41a, 0x1d7ce, ""], "\\boldsymbol": BOLD, "\\bm": BOLD, "\\mathbb": [0x1d538, 0x1d552, 0x1d7d8, "CℂHℍNℕPℙQℚRℝZℤ"], "\\mathcal": SCRIPT, "\\mathscr": SCRIPT,
  "\\mathfrak": [0x1d504, 0x1d51e, null, "CℭHℌIℑRℜZℨ"], "\\mathsf": [0x1d5a0, 0x1d5ba, 0x1d7e2, ""], "\\mathtt": [0x1d670, 0x1d68a, 0x1d7f6, ""], "\\mathrm": null,
}));

// Environments: the fences around them, and the sides on which their columns stand, repeated.
const MATRIX = {columns: "c"};
const ENVIRONMENTS = new Map(Object.entries({
  matrix: MATRIX, smallmatrix: MATRIX, pmatrix: {...MATRIX, open: "(", close: ")"}, bmatrix: {...MATRIX, open: "[", close: "]"}, Bmatrix: {...MATRIX, open: "{", close: "}"},
  vmatrix: {...MATRIX, open: "|", close: "|"}, Vmatrix: {...MATRIX, open: "‖", close: "‖"}, array: {columns: ""}, cases: {columns: "l", open: "{"}, dcases: {columns: "l", open: "{", display: true},
  aligned: {columns: "rl", display: true}, gathered: {columns: "c", display: true},
}));
for (const name of ["align", "split", "eqnarray"]) ENVIRONMENTS.set(name, ENVIRONMENTS.get("aligned"));
for (const name of ["gather", "equation"]) ENVIRONMENTS.set(name, ENVIRONMENTS.get("gathered"));

// "alpha α" becomes "\\alpha" → "α"; keys that are no names stay as they are.
function pairs(text) {
  const list = text.trim().split(/\s+/);
  return new Map(list.flatMap((key, place) => (place % 2 ? [] : [[/^[A-Za-z]+$/.test(key) ? "\\" + key : key, list[place + 1]]])));
}

function commandNames(text) {
  return text.split(" ").map((word) => "\\" + word);
}

// A formula as a <math> element, or null where it is too long or not understood.
export function formula(source, display) {
  if (!source.trim() || source.length > LONGEST || shown(source).some((node) => typeof node !== "string")) return null;
  try {
    const rows = new FormulaParser(source).rows(undefined);
    if (rows.some((cells) => cells.length > 1)) return null; // & stands in environments only
    const content = rows.length > 1 ? tableOf(rows, "c", "c", true) : rows[0][0];
    return mathml("math", {display: display ? "block" : "inline"}, content);
  } catch { // whatever it was: the text stays
    return null;
  }
}

function unknown(what) {
  throw new Error(`not understood: ${what}`);
}

class FormulaParser {
  constructor(source) {
    this.tokens = source.match(LATEX_TOKEN);
    this.place = 0;
    this.depth = 0;
    this.alphabet = "";
  }

  // The next token, which stays; undefined at the end.
  peek() {
    while (/^\s/.test(this.tokens[this.place] ?? "")) this.place += 1;
    return this.tokens[this.place];
  }

  take(expected) {
    const token = this.peek();
    if (token === undefined || (expected && token !== expected)) unknown(token);
    this.place += 1;
    return token;
  }

  takeIf(token) {
    return this.peek() === token && this.take() !== "";
  }

  // The nodes until one of these tokens, which stays.
  row(...ends) {
    const nodes = [];
    let switched = null; // where \displaystyle or \textstyle stands
    for (let token = this.peek(); !ends.includes(token); token = this.peek()) {
      if (token === "\\displaystyle" || token === "\\textstyle") switched = {at: nodes.length, display: this.take() === "\\displaystyle"};
      else if (token === "\\nonumber" || token === "\\notag") this.take();
      else nodes.push(this.scripted());
    }
    if (!switched) return signed(nodes);
    return [...signed(nodes.slice(0, switched.at)), mathml("mrow", {displaystyle: String(switched.display)}, signed(nodes.slice(switched.at)))];
  }

  // Rows of cells, which are lists of nodes.
  rows(end) {
    const rows = [[]];
    for (;;) {
      while (this.takeIf("\\hline")) rows.at(-1).ruled = true;
      if (this.peek() === end && rows.length > 1 && !rows.at(-1).length) return rows.slice(0, -1);
      rows.at(-1).push(this.row("&", "\\\\", end));
      if (this.peek() === end) return rows;
      if (this.take() === "&") continue;
      rows.push([]);
      if (this.tokens[this.place] === "[") this.bracket(/^-?[\d.]+ *(pt|em|ex|mm|cm)$/);
    }
  }

  // What stands in [ ] if it is of this form, as a text; else nothing is taken.
  bracket(form) {
    const end = this.tokens.indexOf("]", this.place);
    const text = this.tokens.slice(this.place + 1, end).join("");
    if (end >= 0 && form.test(text)) this.place = end + 1;
  }

  // What stands in { }, as a text.
  raw() {
    this.take("{");
    let text = "";
    for (let depth = 1; ; this.place += 1) {
      const token = this.tokens[this.place];
      if (token === "{") depth += 1;
      else if (token === "}") depth -= 1;
      else if (token === undefined || token === "$" || /^\\[^$%_&#{} ,]/.test(token)) unknown(token);
      else text += ["~", "\\,"].includes(token) ? " " : token.replace("\\", "");
      if (depth === 0) break;
    }
    this.place += 1;
    return text;
  }

  argument() {
    return this.peek() === "}" ? unknown("}") : this.atom();
  }

  // An atom with what stands above and below it.
  scripted() {
    const base = /^[\^_']$/.test(this.peek()) ? mathml("mrow") : /^\d$/.test(this.peek()) ? this.numeral() : this.atom();
    let limits = base.getAttribute("movablelimits") === "true" || base.getAttribute("class") === "brace";
    while (["\\limits", "\\nolimits"].includes(this.peek())) {
      if (base.localName !== "mo") unknown("limits");
      limits = this.take() === "\\limits";
      base.setAttribute("movablelimits", "false");
    }
    let [below, above] = [null, null];
    for (;;) {
      if (!below && this.takeIf("_")) below = this.argument();
      else if (!above && this.peek() === "'") above = this.primes();
      else if (!above && this.takeIf("^")) above = this.argument();
      else break;
    }
    if (/^[\^_']$/.test(this.peek())) unknown("two scripts");
    if (below && above) return mathml(limits ? "munderover" : "msubsup", {}, base, below, above);
    if (below) return mathml(limits ? "munder" : "msub", {}, base, below);
    return above ? mathml(limits ? "mover" : "msup", {}, base, above) : base;
  }

  primes() {
    let text = "";
    while (this.takeIf("'")) text += "′";
    const own = operator(text);
    return this.takeIf("^") ? mathml("mrow", {}, own, this.argument()) : own;
  }

  // Digits in a row are one number: 12, 3.14, .5 (of which TeX sees the point as a sign).
  numeral() {
    let text = this.take();
    for (let token = this.tokens[this.place]; /^\d$/.test(token) || (token === "." && /^\d$/.test(this.tokens[this.place + 1])); token = this.tokens[this.place]) {
      text += token;
      this.place += 1;
    }
    return mathml("mn", {}, [...text].map((digit) => styled(digit, this.alphabet)).join(""));
  }

  // One token, or a group. All recursion comes through here.
  atom() {
    this.depth += 1;
    if (this.depth > DEEPEST) unknown("too deep");
    const node = this.node(this.take());
    this.depth -= 1;
    return node;
  }

  node(token) {
    if (token === "{") {
      const nodes = this.row("}");
      this.take("}");
      if (nodes.length === 1 && nodes[0].localName === "mo") return spaced(nodes[0], 0, 0); // as TeX has it: 1{,}000
      return together(nodes);
    }
    if (/^\d$/.test(token)) return mathml("mn", {}, styled(token, this.alphabet));
    if (/^\p{L}$/u.test(token)) return letter(token, this.alphabet);
    if (DELIMITERS.has(token)) return spaced(operator(DELIMITERS.get(token)), 0, 0); // a bar would be given the distances of a relation
    if (SPACES.has(token)) return space(SPACES.get(token));
    if (/^\\\s$/.test(token)) return space(SPACES.get("~"));
    if (LETTERS.has(token)) return mathml("mi", {}, LETTERS.get(token));
    if (UPRIGHT.has(token)) return mathml("mi", {mathvariant: "normal"}, UPRIGHT.get(token));
    if (OPERATORS.has(token)) return operator(OPERATORS.get(token));
    if (INTEGRALS.has(token)) return mathml("mo", {}, INTEGRALS.get(token));
    if (LARGE.has(token)) return mathml("mo", {movablelimits: "true"}, LARGE.get(token));
    if (FUNCTIONS.has(token)) return functionName(token.slice(1), LIMITS.includes(token));
    if (token.length > 1 && token.startsWith("\\")) return this.command(token);
    return /^[^\p{ASCII}\p{L}\p{M}\p{C}]$/u.test(token) ? operator(token) : unknown(token);
  }

  command(token) {
    const name = token.slice(1);
    if (/^\\([dt]?(frac|binom)|cfrac)$/.test(token)) return this.fraction(name);
    if (TEXTS.has(token)) return mathml("mtext", {class: TEXTS.get(token)}, this.raw().replaceAll(/\s/g, "\u00a0"));
    if (ALPHABETS.has(token)) return this.inAlphabet(token);
    if (ACCENTS.has(token)) return mathml("mover", {accent: "true"}, this.argument(), mathml("mo", {stretchy: String(/^(wide|over)/.test(name))}, ACCENTS.get(token)));
    if (BRACES.has(token)) return mathml(name === "overbrace" ? "mover" : "munder", {class: "brace"}, this.argument(), mathml("mo", {stretchy: "true"}, BRACES.get(token)));
    if (BOXES.has(token)) return mathml("mrow", {class: BOXES.get(token)}, this.argument());
    if (SIZES.has(name.replace(/(?<=g)[lrm]$/, ""))) return this.sized(SIZES.get(name.replace(/(?<=g)[lrm]$/, "")));
    switch (name) {
      case "sqrt": return this.root();
      case "left": return this.fenced();
      case "middle": return fence(this.delimiter());
      case "begin": return this.environment();
      case "operatorname": return this.operatorName();
      case "overset": case "stackrel": return swapped("mover", this.argument(), this.argument());
      case "underset": return swapped("munder", this.argument(), this.argument());
      case "not": return operator(this.argument().textContent + "\u0338");
      case "mod": return mathml("mrow", {}, space(1), mathml("mi", {}, "mod"), space(0.333), this.argument());
      case "pmod": return mathml("mrow", {}, space(1), operator("("), mathml("mi", {}, "mod"), space(0.333), this.argument(), operator(")"));
      case "tag": return mathml("mrow", {}, space(2), mathml("mtext", {}, `(${this.raw()})`));
      default: return unknown(name);
    }
  }

  fraction(name) {
    const displaystyle = name.startsWith("d") || name === "cfrac" ? "true" : name.startsWith("t") ? "false" : null;
    const [above, below] = [this.argument(), this.argument()];
    if (!name.endsWith("binom")) return mathml("mfrac", {displaystyle}, above, below);
    return mathml("mrow", {displaystyle}, fence("("), mathml("mfrac", {linethickness: "0"}, above, below), fence(")"));
  }

  root() {
    if (!this.takeIf("[")) return mathml("msqrt", {}, this.argument());
    const index = together(this.row("]"));
    this.take("]");
    return mathml("mroot", {}, this.argument(), index);
  }

  // The sign behind \left and the like: "" for a point.
  delimiter() {
    const token = this.take();
    if (token === ".") return "";
    return DELIMITERS.get(token) ?? ONLY_DELIMITERS.get(token) ?? unknown(token);
  }

  fenced() {
    const open = fence(this.delimiter(), {form: "prefix"});
    const inside = this.row("\\right");
    this.take("\\right");
    return mathml("mrow", {}, open, inside, fence(this.delimiter(), {form: "postfix"}));
  }

  sized(size) {
    return fence(this.delimiter(), {symmetric: "true", minsize: `${size}em`, maxsize: `${size}em`});
  }

  operatorName() {
    const limits = this.takeIf("*");
    return functionName(this.raw(), limits);
  }

  // The argument in another alphabet; in \mathrm letters only stand upright.
  inAlphabet(alphabet) {
    const before = this.alphabet;
    this.alphabet = alphabet;
    const node = this.argument();
    this.alphabet = before;
    return node;
  }

  environment() {
    const name = this.raw();
    const own = ENVIRONMENTS.get(name.replace(/^(align|gather|equation|eqnarray)\*$/, "$1")) ?? unknown(name);
    const columns = name === "array" ? this.raw() : own.columns;
    if (!/^[lcr| ]+$/.test(columns)) unknown(columns);
    const rows = this.rows("\\end");
    this.take("\\end");
    if (this.raw() !== name) unknown(name);
    const table = tableOf(rows, columns.replaceAll(" ", ""), name === "array" ? "c" : columns, own.display);
    return mathml("mrow", {}, fence(own.open ?? "", {form: "prefix"}), table, fence(own.close ?? "", {form: "postfix"}));
  }
}

function tableOf(rows, columns, others, display) {
  const sides = columns.match(/\|*[lcr]/g) ?? [];
  const side = (place) => sides[place] ?? others[place % others.length];
  const cell = (nodes, place) => mathml("mtd", {class: `side-${side(place).at(-1)}${side(place).startsWith("|") ? " barred" : ""}`}, nodes);
  return mathml("mtable", {displaystyle: display ? "true" : null, class: others === "rl" ? "aligned" : null}, rows.map((row) => mathml("mtr", {class: row.ruled ? "ruled" : null}, row.map(cell))));
}

function together(nodes) {
  return nodes.length === 1 ? nodes[0] : mathml("mrow", {}, nodes);
}

function swapped(name, script, base) {
  ["lspace", "rspace"].forEach((side) => base.removeAttribute(side)); // a relation in braces is one again
  return mathml(name, {}, base, script);
}

function space(width) {
  return mathml("mspace", {width: `${width}em`});
}

function operator(text) {
  return mathml("mo", {stretchy: "false"}, text);
}

function functionName(name, limits) {
  return mathml("mo", {class: "function", form: "prefix", movablelimits: String(limits)}, name);
}

// A bracket or a bar that grows with what it stands beside; null for none.
function fence(text, properties) {
  return text === "" ? null : spaced(mathml("mo", {stretchy: "true", ...properties}, text), 0, 0);
}

function spaced(node, before, behind) {
  node.setAttribute("lspace", `${before}em`);
  node.setAttribute("rspace", `${behind}em`);
  return node;
}

function letter(character, alphabet) {
  return mathml("mi", {mathvariant: alphabet === "" ? null : "normal"}, styled(character, alphabet));
}

// A letter or digit in an alphabet of Unicode, where it has one.
function styled(character, alphabet) {
  const [capital, small, zero, elsewhere] = ALPHABETS.get(alphabet) ?? [];
  const [first, begin] = /[A-Z]/.test(character) ? ["A", capital] : /[a-z]/.test(character) ? ["a", small] : /[0-9]/.test(character) ? ["0", zero] : [];
  if (!begin) return character;
  const place = elsewhere.indexOf(character);
  return place >= 0 ? elsewhere[place + 1] : String.fromCodePoint(begin + character.codePointAt(0) - first.codePointAt(0));
}

// Distances that depend on the neighbours: a minus at the beginning or behind an operator is a sign, close to its number; sin and the like
// stand a little away from letters and numbers.
function signed(nodes) {
  let inBars = false;
  let beginning = true; // nothing stands before, to which an operator could belong
  nodes.forEach((node, place) => {
    const core = /^m(sub|sup|under|over)/.test(node.localName) ? node.firstElementChild : node;
    if (core.getAttribute("class") === "function") spaced(core, beginning ? 0 : 0.167, /^[([]/.test(nodes[place + 1]?.textContent ?? "(") ? 0 : 0.167);
    else if (node.localName === "mo" && /^[+−±∓]$/.test(node.textContent) && beginning) spaced(node, 0, 0).setAttribute("form", "prefix");
    if (node.textContent === "|") inBars = !inBars;
    beginning = node.localName === "mo" && (node.textContent === "|" ? inBars : !/^[)\]}⟩‖⌋⌉!]$/.test(node.textContent));
  });
  return nodes;
}
