// `study explain`: what a DeepSpeed or Accelerate file does, by line. Files are read here and go to Python.
import { at, call, made, quoted } from "./common.js";

// Python refuses what is larger.
const MAX_BYTES = 1_000_000;
const SEVERITIES = ["error", "warning", "note"];
const COUNTS = ["world_size", "micro_batch", "accumulation"];
const form = at("file-form");
let newest = 0;

// The form's words are those of `study explain` about model and hardware; `ownModel` has its config.json.
export function connectFile(formWords, ownModel) {
  const field = form.elements;
  let chosen = [];

  function ask() {
    const text = field.text.value;
    const pasted = new File([text], text.trimStart().startsWith("{") ? "pasted.json" : "pasted.yaml");
    explain(chosen.length ? chosen : [pasted], formWords(), ownModel());
  }

  async function take(files) {
    // An Accelerate file may name a JSON that is given with it.
    chosen = [...files].sort((one, other) => /\.ya?ml$/i.test(other.name) - /\.ya?ml$/i.test(one.name));
    if (!chosen.length) return;
    field.text.value = await head(chosen[0]).text();
    ask();
  }

  field.files.onchange = () => take(field.files.files);
  field.text.oninput = () => { chosen = []; };
  form.onsubmit = (event) => {
    event.preventDefault();
    ask();
  };
  const hasFiles = (event) => event.dataTransfer.types.includes("Files");
  document.addEventListener("dragover", (event) => {
    if (hasFiles(event)) event.preventDefault();
  });
  document.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    at("explain").open = true;
    at("explain").scrollIntoView();
    take(event.dataTransfer.files);
  });
}

function head(file) {
  return file.slice(0, MAX_BYTES + 1);
}

function base64(blob) {
  return new Promise((done, fail) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => fail(reader.error);
    reader.readAsDataURL(blob);
  });
}

// A name that is not taken for a flag or a home folder.
const argument = (name) => (/^[-~]/.test(name) ? `./${name}` : name);

async function explain(files, formWords, own) {
  newest += 1;
  const [question, status] = [newest, at("explain-status")];
  delete form.dataset.done;
  at("explained").replaceChildren();
  const words = [argument(files[0].name), ...formWords];
  for (const name of COUNTS) {
    if (form.elements[name].value) words.push(`--${name}`, form.elements[name].value);
  }
  at("explain-command").textContent = ["study", "explain", ...words.map(quoted)].join(" ");
  status.textContent = "reading ...";
  let answer;
  let text = "";
  try {
    const contents = {};
    for (const file of files) contents[file.name] = await base64(head(file));
    text = await head(files[0]).text();
    if (own) words[1] = (await call(status, "keep_config", own.name, own.config)).folder;
    answer = await call(status, "explain", JSON.stringify(words), JSON.stringify(contents));
  } catch (error) {
    answer = { refused: error.message, fix: "run study explain on a machine" };
  }
  if (question !== newest) return;
  if (answer.refused) status.textContent = `${answer.refused}. To fix it: ${answer.fix}.`;
  else show(answer, text.split(/\r\n|\r|\n/));
  form.dataset.done = String(question);
}

function show({ first_line: verdict, findings }, lines) {
  at("explain-status").textContent = verdict;
  if (!findings.length) {
    at("explained").replaceChildren(made("p", "Every setting takes effect."));
    return;
  }
  const table = document.createElement("table");
  const titles = table.createTHead().insertRow();
  for (const title of ["line", "", "setting", "what it does", "fix"]) {
    const cell = made("th", title);
    cell.scope = "col";
    cell.className = title === "line" ? "" : "text";
    titles.append(cell);
  }
  const body = table.createTBody();
  const order = (finding) => SEVERITIES.indexOf(finding.severity) * MAX_BYTES + finding.line;
  for (const finding of [...findings].sort((one, other) => order(one) - order(other))) {
    const line = body.insertRow();
    line.className = finding.severity;
    const number = made("th", finding.line);
    number.scope = "row";
    line.append(number);
    const [kind] = finding.id.split("/");
    const texts = [[kind, "span"], [finding.key, "code"], [finding.message, "span"], [finding.fix, "span"]];
    for (const [text, tag] of texts) {
      const cell = line.insertCell();
      cell.className = "text";
      cell.append(made(tag, text));
    }
    // A finding about what the file leaves out has the line of its section, or the first.
    const source = made("code", (lines[finding.line - 1] ?? "").trim().slice(0, 120));
    source.className = "source";
    if (source.textContent.includes(finding.key.split(".").at(-1))) line.cells[2].append(source);
  }
  at("explained").replaceChildren(table);
}
