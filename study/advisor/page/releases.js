// `study releases`: whether a DeepSpeed release computes right gradients, also in a combination of features.
import { at, call, made, quoted } from "./common.js";

const VERDICTS = { 0: "Right", 1: "Wrong", 3: "Not tested" };
const form = at("releases-form");
const field = form.elements;
// Names of this view's values in a link.
const PREFIX = "releases.";
const PACKAGES = ["release", "accelerate", "torch"];
let newest = 0;
// One for each feature, the engine first.
let choices = [];

// By default the packages are those of the tests. Return how a link has this view, and how it is opened.
export function connectReleases({ releases, versions, strategies, features }) {
  choices = Object.entries(features).map(([row, levels]) => chooser(row, levels));
  at("features").append(...choices.map(({ parentElement }) => parentElement));
  at("tested").append(...releases.map((name) => new Option(name)));
  field.strategy.append(...strategies.map((name) => new Option(name)));
  field.release.value = releases[0];
  field.accelerate.value = versions.accelerate;
  field.torch.value = versions.torch.split("+")[0];
  form.onsubmit = (event) => {
    event.preventDefault();
    judge();
  };
  at("features").onchange = showFields;
  showFields();
  return { inLink, open };
}

// The first level of a feature is the default; without an engine no combination is asked about.
function chooser(row, levels) {
  const [label, select] = [made("label", `${row} `), document.createElement("select")];
  const names = Object.entries(levels);
  if (row === "engine") select.append(new Option("none", ""));
  select.append(...names.map(([name, text], place) => new Option(`${name}: ${text}`, place || row === "engine" ? name : "")));
  label.append(select);
  return select;
}

// A combination has its own engine and precision.
function showFields() {
  const isCombined = Boolean(choices[0].value);
  for (const name of ["strategy", "precision"]) field[name].disabled = isCombined;
  for (const choice of choices.slice(1)) choice.parentElement.hidden = !isCombined;
}

const value = (name) => field[name].value.trim();

function combination() {
  return choices[0].value ? choices.map((choice) => choice.value).filter(Boolean) : [];
}

function inLink() {
  const features = combination();
  const names = features.length ? PACKAGES : [...PACKAGES, "strategy", "precision"];
  const values = names.filter(value).map((name) => [`${PREFIX}${name}`, value(name)]);
  if (features.length) values.push([`${PREFIX}features`, features.join(",")]);
  return { values, lacks: "" };
}

async function open(link) {
  if (![...link.keys()].some((name) => name.startsWith(PREFIX))) return;
  at("releases").open = true;
  at("releases").scrollIntoView();
  const unknown = fill((name) => link.get(`${PREFIX}${name}`) ?? "");
  showFields();
  if (unknown) refuse(`this link's ${unknown} is not in the list of this page. To fix it: choose one, and press Judge.`);
  else await judge();
}

// Set the fields; return the first whose value is not in its list.
function fill(values) {
  for (const name of PACKAGES) field[name].value = values(name);
  let unknown = null;
  for (const name of ["strategy", "precision"]) {
    const [first] = field[name].options;
    const asked = values(name) || first.value;
    field[name].value = asked;
    if (field[name].value === asked) continue;
    field[name].value = first.value;
    unknown ??= name;
  }
  const features = values("features").split(",").filter(Boolean);
  for (const choice of choices) {
    const known = [...choice.options].find((option) => option.value && features.includes(option.value));
    choice.value = known?.value ?? "";
  }
  // Also two of one kind, and features without an engine.
  return unknown ?? (combination().length === features.length ? null : "features");
}

// Forget the last answer; return the number of this question.
function begin(text) {
  newest += 1;
  delete form.dataset.done;
  for (const id of ["faults", "nearest", "other-faults", "releases-copied"]) at(id).replaceChildren();
  at("releases-answer").hidden = true;
  at("releases-status").textContent = text;
  return newest;
}

function refuse(text) {
  begin(text);
  form.dataset.done = "yes";
}

async function judge() {
  const question = begin("reading ...");
  const status = at("releases-status");
  const features = combination();
  const words = [value("release"), features.length ? "" : value("strategy")].filter(Boolean);
  for (const name of ["accelerate", "torch"]) {
    if (value(name)) words.push(`--${name}`, value(name));
  }
  if (features.length) words.push("--features", features.join(","));
  else if (value("precision") !== "fp32") words.push("--precision", value("precision"));
  at("releases-command").textContent = ["study", "releases", ...words.map(quoted)].join(" ");
  let answer;
  try {
    answer = await call(status, "releases", JSON.stringify(words));
  } catch (error) {
    answer = { refused: error.message, fix: "run study releases on a machine" };
  }
  if (question !== newest) return;
  if (answer.refused) status.textContent = `${answer.refused}. To fix it: ${answer.fix}.`;
  else show(answer);
  form.dataset.done = "yes";
}

function show({ status, first_line: verdict, faults, columns, rows, other_faults: others, notes }) {
  at("releases-status").textContent = `${VERDICTS[status]}. ${verdict}`;
  at("faults").replaceChildren(...faults.map((text) => made("li", text)));
  if (rows) at("nearest").replaceChildren(grid(columns, rows));
  at("other-faults").replaceChildren(...[...(others ?? []), ...(notes ?? [])].map((text) => made("li", text)));
  at("releases-answer").hidden = false;
}

function grid(columns, rows) {
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  for (const title of columns) {
    const cell = made("th", title);
    cell.scope = "col";
    cell.className = "text";
    head.append(cell);
  }
  const body = table.createTBody();
  for (const [release, ...texts] of rows) {
    const line = body.insertRow();
    line.className = release === value("release") ? "best" : "";
    const first = made("th", release);
    first.scope = "row";
    line.append(first);
    for (const text of texts) {
      const cell = line.insertCell();
      cell.className = "text";
      cell.textContent = text;
    }
  }
  return table;
}
