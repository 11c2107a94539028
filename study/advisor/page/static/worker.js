// Python runs here, beside the page, because it computes for seconds. Messages in both directions have the number of
// their question; the text of each answer is JSON from study/advisor/calculator.py.
import { loadPyodide } from "./pyodide/pyodide.mjs";
import { questions } from "./question.js";

const BASE = new URL(".", import.meta.url).href;
const PACKAGES = "/lib/zero_study";

async function start() {
  const bundle = fetch(`${BASE}study.zip`).then((response) => {
    if (!response.ok) throw new Error(`study.zip: ${response.status}`);
    return response.arrayBuffer();
  });
  const info = await (await fetch(`${BASE}pyodide/info.json`)).json();
  // No package is loaded, so the list of packages is empty, and no other host is asked for one.
  const python = await loadPyodide({
    indexURL: `${BASE}pyodide/`, packageBaseUrl: `${BASE}pyodide/`, lockFileContents: { info, packages: {} },
  });
  python.FS.mkdirTree(PACKAGES);
  python.unpackArchive(await bundle, "zip", { extractDir: PACKAGES });
  python.runPython(`
import os, sys
sys.path.insert(0, "${PACKAGES}")
sys.dont_write_bytecode = True
os.chdir("${PACKAGES}")
os.environ["HOME"] = "/tmp"
`);
  return { python, session: python.pyimport("study.advisor.calculator").Calculator() };
}

// Only `study explain` needs these: pydantic, whose core is WebAssembly, too.
let wheels = null;

async function loadWheels(python) {
  const response = await fetch(`${BASE}wheels.zip`);
  if (!response.ok) throw new Error(`wheels.zip: ${response.status}`);
  python.unpackArchive(await response.arrayBuffer(), "zip", { extractDir: PACKAGES });
}

// A question may arrive while Python starts, so it is listened to from the beginning.
const started = start();
started.catch((error) => postMessage({ id: 0, failed: String(error.message ?? error) }));

// A newer question is read between two calls.
const pause = () => new Promise((done) => setTimeout(done, 0));

async function ask(method, ...words) {
  const { python, session } = await started;
  if (method === "explain") {
    wheels ??= loadWheels(python);
    wheels.catch(() => { wheels = null; });
    await wheels;
  }
  await pause();
  return session[method](...words);
}

const answer = questions(() => ask, (message) => postMessage(message));
onmessage = ({ data }) => answer(data);
