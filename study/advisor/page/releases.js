// `study releases`: whether a DeepSpeed release computes right gradients, also in a combination of features.
import { at, call, made, quoted } from "./common.js";

const VERDICTS = { 0: "Right", 1: "Wrong", 3: "Not tested" };
const form = at("releases-form");

// By default the packages are those of the tests.
export function connectReleases({ releases, versions, strategies, features }) {
  const field = form.elements;
  const choices = Object.entries(features).map(([row, levels]) => chooser(row, levels));
  at("features").append(...choices.map(({ parentElement }) => parentElement));
  at("tested").append(...releases.map((name) => new Option(name)));
  field.strategy.append(...strategies.map((name) => new Option(name)));
  field.release.value = releases[0];
  field.accelerate.value = versions.accelerate;
  field.torch.value = versions.torch.split("+")[0];
  form.onsubmit = (event) => {
    event.preventDefault();
    judge(field, choices);
  };
  // A combination has its own engine and precision.
  at("features").onchange = () => {
    for (const name of ["strategy", "precision"]) field[name].disabled = Boolean(choices[0].value);
  };
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

async function judge(field, choices) {
  const [status, value] = [at("releases-status"), (name) => field[name].value.trim()];
  delete form.dataset.done;
  const features = choices[0].value ? choices.map((choice) => choice.value).filter(Boolean) : [];
  const words = [value("release"), features.length ? "" : value("strategy")].filter(Boolean);
  for (const name of ["accelerate", "torch"]) {
    if (value(name)) words.push(`--${name}`, value(name));
  }
  if (features.length) words.push("--features", features.join(","));
  else if (value("precision") !== "fp32") words.push("--precision", value("precision"));
  at("releases-command").textContent = ["study", "releases", ...words.map(quoted)].join(" ");
  at("faults").replaceChildren();
  status.textContent = "reading ...";
  let answer;
  try {
    answer = await call(status, "releases", JSON.stringify(words));
  } catch (error) {
    answer = { refused: error.message, fix: "run study releases on a machine" };
  }
  status.textContent = answer.refused
    ? `${answer.refused}. To fix it: ${answer.fix}.` : `${VERDICTS[answer.status]}. ${answer.first_line}`;
  at("faults").replaceChildren(...(answer.faults ?? []).map((text) => made("li", text)));
  form.dataset.done = "yes";
}
