// Python on this machine: `study serve`, which answers a call a request.
import { questions } from "./question.js";

export const header = "study advise, study explain and study releases of zero-study, by the Python of study serve on this machine: with its "
  + "torch also for models that only transformers' own code describes. Nothing is sent to another machine.";
const SLOW_MS = 2_000;

// `say` shows a text where the newest question is, and `listen` takes the answers.
export function connect(say, listen) {
  say("asking Python on this machine ...");
  let newest = null;

  async function send(session, method, words) {
    const slow = setTimeout(() => {
      if (session === newest) say("still computing; a model that no table describes is traced first, which takes up to a minute ...");
    }, SLOW_MS);
    let response;
    try {
      response = await fetch("ask", {
        method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ session, method, words }),
      });
    } catch {
      throw new Error("study serve does not answer: it has ended, or its machine is not reached");
    } finally {
      clearTimeout(slow);
    }
    const text = await response.text();
    if (!response.ok) throw new Error(text);
    return text;
  }

  // Each question has its own session in Python, so that a new one does not wait for the call of the last. Calls of one
  // session are sent one at a time, in their order, as in a worker.
  function open() {
    const session = crypto.randomUUID();
    newest = session;
    let before = Promise.resolve();
    return (method, ...words) => {
      const answer = before.then(() => send(session, method, words));
      before = answer.catch(() => {});
      return answer;
    };
  }

  return questions(open, listen);
}
