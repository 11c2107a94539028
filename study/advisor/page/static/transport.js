// Python in this browser: worker.js, whose Pyodide runs the project's modules.

// The text below the heading is that of the page.
export const header = null;

// `say` shows a text where the newest question is, and `listen` takes the answers.
export function connect(say, listen) {
  say("Python is loading: 14 MB once, 7 where the server compresses ...");
  const worker = new Worker("worker.js", { type: "module" });
  const fail = (text) => {
    say(`Python does not start in this browser${text}`);
    document.getElementById("progress").hidden = true;
  };
  worker.onerror = () => fail(".");
  worker.onmessage = ({ data }) => {
    if (data.id === 0 && data.failed) fail(`: ${data.failed}`);
    else listen(data);
  };
  return (message) => worker.postMessage(message);
}
