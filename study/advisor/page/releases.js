// `study releases`: whether a DeepSpeed release computes right gradients.
import { at, call, made, quoted } from "./common.js";

const VERDICTS = { 0: "Right", 1: "Wrong", 3: "Not tested" };
const form = at("releases-form");

// By default the packages are those of the tests.
export function connectReleases({ releases, versions, strategies }) {
  const field = form.elements;
  at("tested").append(...releases.map((name) => new Option(name)));
  field.strategy.append(...strategies.map((name) => new Option(name)));
  field.release.value = releases[0];
  field.accelerate.value = versions.accelerate;
  field.torch.value = versions.torch.split("+")[0];
  form.onsubmit = (event) => {
    event.preventDefault();
    judge(field);
  };
}

async function judge(field) {
  const [status, value] = [at("releases-status"), (name) => field[name].value.trim()];
  delete form.dataset.done;
  const words = [value("release"), value("strategy")].filter(Boolean);
  for (const name of ["accelerate", "torch"]) {
    if (value(name)) words.push(`--${name}`, value(name));
  }
  if (value("precision") !== "fp32") words.push("--precision", value("precision"));
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
