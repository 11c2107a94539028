// Python runs here, beside the page, because it computes for seconds. Messages in both directions have the number of
// their question; the text of each answer is JSON from study/advisor/calculator.py.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const BASE = new URL(".", import.meta.url).href;
const PACKAGES = "/lib/zero_study";
let newest = 0;

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

// A newer question ends this one between two strategies.
const pause = () => new Promise((done) => setTimeout(done, 0));

async function compare(session, id, { words, config, name }) {
  newest = id;
  const say = (message) => postMessage({ id, ...message });
  if (config) words = [JSON.parse(session.keep_config(name, config)).folder, ...words.slice(1)];
  const about = session.ask(JSON.stringify(words));
  say({ about });
  const { names } = JSON.parse(about);
  for (const method of names ? ["one_sample", "best"] : []) {
    for (const strategy of names) {
      say({ strategy, method, row: session[method](strategy) });
      await pause();
      if (newest !== id) return;
    }
  }
  if (names) say({ rank: session.rank() });
}

// A question may arrive while Python starts, so it is listened to from the beginning.
const started = start();
started.catch((error) => postMessage({ id: 0, failed: String(error.message ?? error) }));

onmessage = async ({ data: { id, call, ...rest } }) => {
  const { python, session } = await started;
  try {
    if (call === "explain") {
      wheels ??= loadWheels(python);
      wheels.catch(() => { wheels = null; });
      await wheels;
    }
    if (call === "compare") await compare(session, id, rest);
    else postMessage({ id, answer: session[call](...(rest.words ?? [])) });
  } catch (error) {
    postMessage({ id, failed: String(error.message ?? error) });
  }
};
